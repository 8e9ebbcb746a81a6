"""Evidence that was sealed anew: a seal has no key, so anybody can."""

import json
from pathlib import Path

from damage import replace
from data_files import json_of
from keepmtp.checkpoints.identity import identify
from keepmtp.validate.facts.results import seal_of
from keepmtp.validate.report.report import from_results, text_of


def seal(folder: Path) -> None:
    """Each result is of the bytes that are there now, and says so; report.json follows."""
    evidence = folder / "NAME.report"
    identity = identify(folder / "NAME")
    for path in evidence.glob("*.json"):
        result = json_of(path)
        if "seal" in result:
            text = path.read_text().replace(result["checkpoint"]["sha256"], identity.sha256)
            result = json.loads(text) | {"checkpoint": identity.model_dump(mode="json")}
            replace(path, json.dumps(result | {"seal": seal_of(result)}).encode())
    replace(evidence / "report.json", text_of(from_results(evidence)).encode())
