"""The arguments and options that several verbs have, with their help."""

from typing import Annotated

import typer

ModelArgument = Annotated[
    str, typer.Argument(help="A model's name, a recipe's full name, or a recipe file. See `keepmtp ls`.")
]
SourceOption = Annotated[
    str | None, typer.Option("--source", help="Folder or Hub id of the released checkpoint; default: the recipe's.")
]
SchemeOption = Annotated[
    str | None, typer.Option("--scheme", help="Another variant of the model, or a scheme for every quantized group.")
]
MtpOption = Annotated[
    str | None,
    typer.Option(
        "--mtp",
        help="MTP block: `source`, `bf16`, a scheme, or `auto`: the smallest that "
        "keeps enough acceptance, measured during the run; default: the recipe's.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for machines instead of tables.")]
PortOption = Annotated[int | None, typer.Option(min=1, max=65535, help="Of the servers; default: a free one.")]
TimeoutOption = Annotated[float, typer.Option(min=1, help="Seconds a server may take to be healthy.")]
TrustOption = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code",
        help="You have read the checkpoint's own Python: a recipe with `model_code: checkpoint` may run it, and the "
        "output gets its .py files.",
    ),
]
