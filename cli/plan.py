"""`keepmtp plan`: the plan for every tensor, from headers alone.

In: a model and choices. Out: tables, or JSON. Nothing is written.
"""

from .options import (
    CalibrationOption,
    JsonOption,
    ModelArgument,
    MtpOption,
    MtpSourceOption,
    SchemeOption,
    SourceOption,
    TrustOption,
)


def plan(
    model: ModelArgument,
    source: SourceOption = None,
    scheme: SchemeOption = None,
    mtp: MtpOption = None,
    calibration: CalibrationOption = None,
    mtp_source: MtpSourceOption = None,
    trust_remote_code: TrustOption = False,
    as_json: JsonOption = False,
) -> None:
    """Show what would become of every tensor, from headers alone: no weight is read, nothing is written.

    Works on a folder or, by range requests, on a Hub id, in seconds even for 130,000 tensors. Of a calibrated recipe it
    also says what batches contribute to which modules, and whether the MTP block can be measured.

    Example: `keepmtp plan dsv4-flash --source /data/DeepSeek-V4-Flash --scheme w4a16-fp8`

    Example: `keepmtp plan /data/my-fine-tune --scheme nvfp4a16-fp8`
    """
    from .. import api
    from . import plan_tables

    words = {"source": source, "scheme": scheme, "mtp": mtp, "calibration": calibration, "mtp_source": mtp_source}
    made = api.plan(model, **words, trust_remote_code=trust_remote_code)
    plan_tables.show(made, as_json=as_json)
