"""Will vLLM load this checkpoint, and draft with it? From headers on the Hub, before a download.

    python examples/check_hub_id.py ORG/NAME

The exit status is 1 where the check finds an error.
"""

import sys

from keepmtp import api


def main(where: str) -> int:
    """Print what is found; a finding is one cause, however many tensors it has."""
    try:
        judged = api.check(where)
    except api.KeepMTPError as refusal:
        print(refusal)
        return 2
    for finding in judged.findings:
        print(f"{finding.severity}: {finding.where} ({finding.count})")
        print(f"  {finding.says}")
        print(f"  {finding.cure}")
    verdict = "good" if judged.ok else "not good"
    print(f"{where}: {verdict}, by the rules of vLLM {judged.judged_by}")
    return 0 if judged.ok else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
