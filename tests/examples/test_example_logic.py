"""What the examples do with the answers they get, on scripted ones."""

from __future__ import annotations

import time

import pytest
import ramet as rt


def of(backend, name):
    """The calls for one variable."""
    return [call for call in backend.calls if call.name == name]


def test_few_shots_are_cached_and_answers_keep_their_order(example, scripted):
    module = example("few_shot_qa")
    backend = scripted({"answer": lambda prompt: prompt[-10:-4].upper()})
    module.few_shot_qa.cache(backend)
    questions = [f"Is it word {number}?" for number in range(10)]
    assert module.ask(backend, questions) == [f"WORD {number}" for number in range(10)]
    warm, *asked = backend.calls
    assert warm.kind == "warm"
    assert "Berlin" in warm.prompt
    assert all(call.prompt.startswith(warm.prompt + "Is it") for call in asked)
    assert all(call.sampling.temperature == 0 for call in asked)


def test_a_chat_remembers(example, scripted):
    backend = scripted({f"answer {number}": f"<{number}>" for number in range(3)})
    state = example("chat").chat.run(["a", "b", "c"], backend=backend)
    roles = [message["role"] for message in state.messages()]
    assert roles == ["system", *["user", "assistant"] * 3]
    assert [m["content"] for m in state.messages()[1:]] == ["a", "<0>", "b", "<1>", "c", "<2>"]
    first, second, third = backend.calls
    assert second.prompt.startswith(first.prompt + "<0>")
    assert third.prompt.startswith(second.prompt + "<1>")


def test_tips_are_written_side_by_side_and_summed_up(example, scripted):
    def tip_of(prompt: str) -> str:
        return "on " + prompt.split("one tip about ")[1].split(".")[0]

    backend = scripted({"tip": tip_of, "summary": "sum"}, delay=0.3)
    began = time.monotonic()
    state = example("parallel_tips").parallel_tips.run("live", backend=backend)
    assert time.monotonic() - began < 1.0, "one after the other it takes 1.2 s"
    assert len(state["tip"]) == 3
    (summary,) = of(backend, "summary")
    for heading, tip in zip(("eating well", "exercise", "sleep"), state["tip"], strict=True):
        assert tip == f"on {heading}"
        assert f"{heading}: {tip}" in summary.prompt


def test_a_tree_of_thought_keeps_the_best(example, scripted):
    module = example("tree_of_thought")
    backend = scripted(
        {
            "sentence": lambda call: " good" if call.sampling.seed % 3 == 1 else " dull",
            "verdict": lambda prompt: "No" if " dull" in prompt else "Yes",
        }
    )
    state = module.tree_of_thought.run("Begin.", backend=backend)
    assert state.ret_value == "Begin. good. good. good."
    drafts, verdicts = of(backend, "sentence"), of(backend, "verdict")
    assert len(drafts) == len(verdicts) == 3 + 6 + 6
    assert all("Question" not in call.prompt for call in drafts), "a story saw its judge"
    assert len({call.sampling.seed for call in drafts}) == 9


def test_a_tree_of_thought_drops_empty_drafts_whatever_the_judge_says(example, scripted):
    backend = scripted(
        {
            "sentence": lambda call: " word" if call.sampling.seed % 3 == 2 else ".",
            "verdict": lambda prompt: "No" if " word" in prompt else "Yes",
        }
    )
    state = example("tree_of_thought").tree_of_thought.run("Begin.", backend=backend)
    assert state.ret_value == "Begin. word. word. word."
    nothing = scripted({"sentence": ".", "verdict": "Yes"})
    state = example("tree_of_thought").tree_of_thought.run("Begin.", backend=nothing)
    assert state.ret_value == "Begin...."


def test_a_skeleton_is_filled_point_by_point(example, scripted):
    points = {f"point {number}": f" p{number}" for number in (1, 2, 3)}
    backend = scripted({**points, "sentence": lambda prompt: prompt.split("<user>")[1][:2]})
    state = example("skeleton_of_thought").skeleton_of_thought.run("Why?", backend=backend)
    assert state["sentence"] == ["p1", "p2", "p3"]
    assert of(backend, "point 3")[0].prompt.endswith("Question: Why?\n1. p1\n2. p2\n3.")


def test_a_judge_merges_what_the_branches_found(example, scripted):
    backend = scripted(
        {
            "comment": lambda prompt: "on " + prompt.split("Comment on its ")[1].split(".")[0],
            "grade": lambda prompt: "good" if "persuasion" in prompt else "poor",
            "verdict": " fine",
        }
    )
    state = example("judge").judge.run("An essay.", backend=backend)
    assert state["comment"] == ["on clarity", "on persuasion", "on style"]
    assert state["grade"] == ["poor", "good", "poor"]
    (verdict,) = of(backend, "verdict")
    assert "on clarity. on persuasion. on style. All in all," in verdict.prompt
    assert "Comment on its" not in verdict.prompt


def test_an_agent_looks_up_then_finishes(example, scripted):
    module = example("react_agent")
    script = {f"thought {step}": " hm" for step in range(4)}
    script |= {"action 0": "lookup", "argument 0": "Madrid"}
    script |= {"action 1": "lookup", "argument 1": "Oslo"}
    script |= {"action 2": "finish", "argument 2": "42"}
    state = module.react.run("How many?", backend=scripted(script))
    assert state.ret_value == "42"
    lines = state.text().removeprefix(module.SHOTS).splitlines()
    assert lines[2:4] == ["Action: lookup[Madrid]", "Observation: 3300000"]
    assert lines[5:7] == ["Action: lookup[Oslo]", "Observation: Oslo is not in the table"]
    assert lines[-1] == "Action: finish[42]"


def test_an_agent_stops_when_its_steps_are_used_up(example, scripted):
    module = example("react_agent")
    backend = scripted(default=lambda call: "lookup" if call.kind == "select" else "Rome")
    state = module.react.run("How many?", backend=backend)
    assert state.ret_value is None
    assert state.text().removeprefix(module.SHOTS).count("Observation: 2800000") == module.STEPS


def test_a_debate_is_heard_by_the_other_side_only(example, scripted):
    script = {f"turn {turn}": f" r{turn}" for turn in range(4)}
    backend = scripted({**script, "winner": "dogs"})
    state = example("debate").debate.run("cats", "dogs", backend=backend)
    sides = ["cats", "dogs"] * 2
    said = [f"I prefer {side} because r{turn}." for turn, side in enumerate(sides)]
    assert state.ret_value == said
    assert state["winner"] == "dogs"
    for turn in range(1, 4):
        (call,) = of(backend, f"turn {turn}")
        assert f"<user>{said[turn - 1]}</user>" in call.prompt
        assert f"You are for {sides[turn]}" in call.prompt
        assert f"You are for {sides[turn - 1]}" not in call.prompt
    (jury,) = of(backend, "winner")
    assert "\n".join(said) in jury.prompt
    assert "You are in a debate" not in jury.prompt


def test_retrieval_finds_what_answers(example):
    module = example("retrieval_qa")
    index = module.BM25(module.PASSAGES)
    for question, word in zip(module.QUESTIONS, ("1871", "12", "Mondays", "Ole"), strict=True):
        found = index.search(question, top=2)
        assert len(found) == 2
        assert word in found[0]
    assert index.search("nothing of this kind", top=1)
    assert index.score("unknown words", index.counts[0]) == 0


def test_rare_words_and_short_passages_count_more(example):
    index = example("retrieval_qa").BM25(["a cat", "a cat and many other things", "a dog", "a a a"])
    assert index.search("cat", top=2) == ["a cat", "a cat and many other things"]
    assert index.search("a dog", top=1) == ["a dog"]


def test_retrieval_asks_about_what_was_found(example, scripted):
    module = example("retrieval_qa")
    backend = scripted({"answer": " yes"})
    state = module.answer.run(["One.", "Two."], "Which?", backend=backend)
    assert state["answer"] == " yes"
    assert backend.calls[0].prompt == module.SHOTS + "Text: One. Two.\nQuestion: Which?\nAnswer:"


def test_samples_vote(example, scripted):
    module = example("self_consistency")
    chains = [f" The answer is {number}." for number in (8, 7, 8, -2, 8, 7)]
    backend = scripted({"chains": [*chains, " I do not know.", " The answer is many."]})
    state = module.reason.run("How many?", backend=backend)
    assert module.vote(state["chains"]).most_common() == [("8", 3), ("7", 2), ("-2", 1)]
    assert backend.calls[0].sampling.n == len(state["chains"]) == module.SAMPLES


def test_a_classifier_is_compiled_and_knows_how_sure_it_is(example, scripted):
    module = example("classify")
    backend = scripted({"label": lambda prompt: "music" if "song" in prompt else "science"})
    states = module.classify.run_batch([("A song",), ("A star",)], backend=backend)
    assert [state["label"] for state in states] == ["music", "science"]
    odds = module.probabilities(states[0])
    assert sum(odds.values()) == pytest.approx(1)
    assert max(odds, key=odds.__getitem__) == "music"
    assert backend.calls[0].choices == tuple(module.LABELS)


async def test_async_programs_run_side_by_side(example, scripted):
    module = example("async_programs")
    backend = scripted({"answer": lambda prompt: prompt.split("<user>")[1][:2]}, delay=0.2)
    began = time.monotonic()
    answers = await module.side_by_side(backend, [f"q{number}" for number in range(8)])
    assert answers == [f"q{number}" for number in range(8)]
    assert time.monotonic() - began < 1.4, "one after the other it takes 1.6 s"


async def test_async_text_comes_in_pieces(example, scripted, capsys):
    backend = scripted({"answer": "piece by piece"})
    assert await example("async_programs").streamed(backend, "?") == "piece by piece"
    assert capsys.readouterr().out == "piece by piece\n"


async def test_what_takes_too_long_is_given_up(example, scripted):
    module = example("async_programs")
    assert not await module.given_up(scripted({"answer": "x"}), "?", 5)
    slow = scripted({"answer": "x"}, delay=30)
    assert await module.given_up(slow, "?", 0.05)
    deadline = time.monotonic() + 5
    while slow.open_contexts and time.monotonic() < deadline:
        time.sleep(0.01)
    assert slow.open_contexts == 0


def test_branches_are_drawn_as_they_grow(example, scripted, capsys):
    module = example("branches")
    backend = scripted({"tip": ["rise early", "walk [much]", "eat"], "best": "2"})
    console = module.Console()
    state = module.advise.run("life", backend=backend, stream=True)
    texts = module.show(state, console)
    assert texts == state["tip"]
    assert sorted(texts) == ["eat", "rise early", "walk [much]"]
    assert "walk [much]" in capsys.readouterr().out


def test_branches_raise_what_failed(example, scripted):
    backend = scripted({"tip": ["one", rt.BackendError("gone"), "three"], "best": "1"})
    with pytest.raises(rt.BackendError, match="gone"):
        example("branches").main(backend)


def test_a_compiled_agent_looks_up_until_it_has_finished(example, scripted):
    backend = scripted(
        {
            "thought": lambda prompt: " hm" if "Observation: 2800000" not in prompt else " ah",
            "action": ["lookup", "lookup", "finish"],
            "argument": ["Atlantis", "Rome ", "2800000"],
        }
    )
    module = example("react_compiled")
    state = module.react.compile().run("Where?", backend=backend)
    assert (state.ret_value, state["steps"]) == ("2800000", "3")
    text = state.text().removeprefix(module.SHOTS)
    assert "Observation: Atlantis is not in the table\n" in text
    assert text.endswith("Observation: 2800000\nThought: ah\nAction: finish[2800000]\n")
