"""keepmtp: quantize large models for vLLM and keep their MTP block usable.

The library follows one line: recipe -> family -> source -> plan -> write -> check.
`keepmtp.pipeline.quantize` is that line on one screen; the plan
(`keepmtp.quantize.plan.plan.make_plan`) is the value everything else reads.

From Python, use `keepmtp.api`: plan, quantize, check, load_recipe, report, card, and their types
(docs/api.md). They are not here, because `keepmtp.quantize` is a folder of the package.
"""

__version__ = "0.1.0"
