"""What servers did, from numbers alone."""

from keepmtp.validate.facts.served import Output, Run, partings


def test_partings():
    top = ({1: -0.1}, {2: -0.7, 5: -0.8, 9: -3.0}, {3: -0.1})
    plain = [Output(token_ids=(1, 2, 3), text="", top_logprobs=top)] * 5
    others = [(1, 2, 3), (1, 5, 3), (1, 9), (1, 7, 3), (1, 2)]
    found = partings(plain, [Output(token_ids=ids, text="") for ids in others])
    assert [(p.prompt, p.at, p.plain_token, p.token) for p in found] == [
        (1, 1, 2, 5),
        (2, 1, 2, 9),
        (3, 1, 2, 7),
        (4, 2, 3, None),
    ]
    assert [p.gap and round(p.gap, 6) for p in found] == [0.1, 2.3, None, None]
    assert [p.is_near_tie for p in found] == [True, False, False, False]


def test_a_file_gives_the_counts_and_no_figure():
    """What is computed is computed again: a figure that the counts do not give is not read."""
    run = Run(
        k=2,
        loaded=True,
        drafts=10,
        draft_tokens=20,
        accepted_tokens=17,
        accepted_per_position=(10, 7),
    )
    written = run.model_dump(mode="json")
    assert written["acceptance"] == 0.85 and written["acceptance_per_position"] == [1.0, 0.7]
    assert Run.model_validate(written | {"acceptance": 0.99}) == Run.model_validate(written) == run
