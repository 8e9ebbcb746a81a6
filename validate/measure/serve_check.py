"""The station acceptance: source and checkpoint, each served at several k, asked the same prompts
one at a time.

In: two local checkpoints and a `Setup`. Out: a `ServeCheck`, and a file of outputs for each server.

Easy to get wrong: vLLM loads a dead draft without a word. Its acceptance tells, which is measured
here; which weight nobody wrote, the dry load finds.
"""

from contextlib import nullcontext
from functools import partial

from ...recipes.frozen import frozen
from ..facts.served import Run, ServeCheck, Served, partings
from .harness import Failures, Model, Setup, Work, as_hosted, drafted_by, room_for
from .server import Server
from .store import Continuation


@frozen
class AcceptanceStation:
    """The station: how to serve, whom, and what to ask.

    Attributes:
        setup, source, checkpoint: how to serve, and what.
        ks: tokens drafted a step, ascending, starting with 0.
        prompts, max_tokens: what is asked, and the limit of an answer.
    """

    setup: Setup
    source: Model | None
    checkpoint: Model
    ks: tuple[int, ...]
    prompts: tuple[str, ...]
    max_tokens: int

    def works(self, model: Model) -> list[Work]:
        """What a checkpoint is asked, at every k.

        Raises:
            CheckpointError: outputs that cannot be read.
        """
        return [self._work(model, k) for k in sorted({drafted_by(model, k) for k in self.ks})]

    def fact(self, failures: Failures) -> ServeCheck:
        """What both answered, or how their servers failed; without a source acceptance stays
        unjudged.
        """
        return ServeCheck(
            source=self.source and self.served(self.source, failures),
            checkpoint=self.served(self.checkpoint, failures),
            num_prompts=len(self.prompts),
            environment=self.setup.environment,
        )

    def served(self, model: Model, failures: Failures) -> Served:
        """One checkpoint at every k that was tried."""
        how = as_hosted(model, self.setup)
        runs = list[Run]()
        plain = list[Continuation]()
        for work in self.works(model):
            log = str(self.setup.log(work.name))
            failure = failures.get((model.role, work.k))
            if failure and work.file.missing:
                runs.append(Run(k=work.k, loaded=False, error=failure.words, log=log))
                if not work.k:
                    break
                continue
            lines = work.file.in_order()
            parted = None
            if not work.k:
                plain = lines
            elif plain:
                parted = partings(plain, lines)
            counts = work.file.counts
            runs.append(Run(k=work.k, loaded=True, log=log, partings=parted, **counts))
            how = work.file.served
        return Served(
            role=model.role,
            path=model.source.where,
            runs=tuple(runs),
            **how,
        )

    def _work(self, model: Model, k: int) -> Work:
        """The prompts, for one server."""
        name = f"serve.{model.role}.k{k}"
        most = self.max_tokens
        asked = {"k": k, "prompts": self.prompts, "max_tokens": most}
        file = self.setup.answers(name, Continuation, model, num=len(self.prompts), **asked)

        def ask(server: Server, prompt: int) -> Continuation:
            output = server.complete(self.prompts[prompt], max_tokens=most)
            return Continuation(prompt=prompt, **dict(output))

        room = room_for(self.prompts, model.source, is_chat=False, max_tokens=most)
        return Work(
            name=name,
            model=model,
            file=file,
            asking=lambda server: nullcontext(partial(ask, server)),
            k=k,
            max_model_len=room,
            max_num_seqs=4,
            may_fail=True,
            unit="prompt",
            task="acceptance",
        )
