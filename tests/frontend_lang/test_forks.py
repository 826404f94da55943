from __future__ import annotations

import pytest
import ramet as rt


def _run(body, backend, **kwargs):
    return rt.function(body).run(backend=backend, **kwargs)


def test_branches_share_what_was_and_grow_apart(scripted):
    def body(s):
        s += "root:" + rt.gen("a")
        forks = s.fork(3)
        for i, branch in enumerate(forks):
            branch += f"[{i}]" + rt.gen("b")
        return [branch.text() for branch in forks], [branch["a"] for branch in forks]

    backend = scripted({"a": "A", "b": lambda prompt: prompt[-2]})
    texts, values = _run(body, backend).ret_value
    assert texts == ["root:A[0]0", "root:A[1]1", "root:A[2]2"]
    assert values == ["A"] * 3
    assert backend.open_contexts == 0


def test_a_group_is_a_sequence(scripted):
    def body(s):
        forks = s.fork(3)
        forks += "x"
        forks += lambda i: f"<{i}>"
        forks += ["a", rt.gen("g"), "c"]
        forks[0] += "!"
        assert len(forks) == 3
        return [branch.text() for branch in forks]

    assert _run(body, scripted({"g": "b"})).ret_value == ["x<0>a!", "x<1>b", "x<2>c"]


def test_a_group_refuses_what_does_not_fit(scripted):
    def body(s):
        forks = s.fork(2)
        with pytest.raises(ValueError, match="3 expressions for 2 branches"):
            forks += ["a", "b", "c"]
        with pytest.raises(ValueError, match="replaced"):
            forks[0] = s
        with pytest.raises(rt.ProgramError, match="mode"):
            forks.join("zip")
        with pytest.raises(rt.ProgramError, match="at least 1"):
            s.fork(0)

    _run(body, scripted())


def test_join_gathers_what_is_new_with_none_for_what_is_missing(scripted):
    def body(s):
        s += rt.gen("old")
        forks = s.fork(3)
        for i, branch in enumerate(forks):
            branch += rt.gen("x")
            if i == 1:
                branch += rt.gen("only")
        forks.join()
        return s["x"], s["only"], s["old"]

    backend = scripted({"old": "o", "x": lambda _: "v", "only": "1"})
    state = _run(body, backend)
    assert state.ret_value == (["v"] * 3, [None, "1", None], "o")
    assert state.text() == "o"
    assert state.get_meta_info("only")[0] is None
    assert state.get_meta_info("only")[1]["completion_tokens"] > 0


def test_join_can_append_the_texts(scripted):
    def body(s):
        s += "p"
        forks = s.fork(3)
        forks += lambda i: f"<{i}" + rt.gen("x") + ">"
        forks.join("concate_and_append")
        s += "."
        return "x" in s

    state = _run(body, scripted({"x": lambda prompt: prompt[-1]}))
    assert state.text() == "p<00><11><22>."
    assert state.ret_value is False


def test_a_joined_branch_takes_no_more_but_can_be_read(scripted):
    def body(s):
        forks = s.fork(2)
        forks += "a" + rt.gen("x")
        forks.join()
        with pytest.raises(rt.ProgramError, match="ended"):
            forks[0] += "more"
        with pytest.raises(rt.ProgramError, match="ended"):
            forks.join()
        return [branch.text() for branch in forks], forks[1]["x"]

    assert _run(body, scripted({"x": lambda _: "1"})).ret_value == (["a1", "a1"], "1")


def test_joining_again_replaces_the_lists(scripted):
    def body(s):
        seen = []
        for _ in range(2):
            forks = s.fork(2)
            forks += rt.gen("x")
            forks.join()
            seen.append(list(s["x"]))
        return seen

    state = _run(body, scripted({"x": ["a", "a", "b", "b"]}))
    assert state.ret_value == [["a", "a"], ["b", "b"]]


def test_copy_is_a_branch_and_joins_as_a_block(scripted):
    def body(s):
        s += "p"
        with s.copy() as c:
            c += rt.gen("x")
        other = s.copy()
        other += "!"
        return s["x"], s.text(), other.text()

    assert _run(body, scripted({"x": "1"})).ret_value == (["1"], "p", "p!")


def test_a_block_of_forks_joins_at_its_end(scripted):
    def body(s):
        with s.fork(2) as forks:
            forks += rt.gen("x")
        return s["x"]

    assert _run(body, scripted({"x": ["1", "1"]})).ret_value == ["1", "1"]


def test_forks_inside_a_message_and_before_any_text(scripted):
    def body(s):
        early = s.fork(2)
        early += rt.user("hi")
        s += rt.user_begin() + "q"
        inner = s.fork(2)
        inner += lambda i: f"{i}" + rt.user_end()
        return [b.messages() for b in early], [b.messages() for b in inner]

    early, inner = _run(body, scripted()).ret_value
    assert early == [[{"role": "user", "content": "hi"}]] * 2
    assert [m[0]["content"] for m in inner] == ["q0", "q1"]


def test_a_failed_branch_costs_only_itself(scripted):
    def answer(prompt: str):
        return rt.BackendError("bad branch") if prompt.endswith("1") else "fine"

    def body(s):
        forks = s.fork(3)
        forks += lambda i: f"{i}" + rt.gen("x")
        s += "root" + rt.gen("y")
        return forks

    state = _run(body, scripted({"x": lambda p: answer(p), "y": "Y"}))
    forks = state.ret_value
    assert forks[0]["x"] == forks[2]["x"] == "fine"
    assert state["y"] == "Y"
    assert state.text() == "rootY"
    with pytest.raises(rt.BackendError, match=r"bad branch \(at test_forks"):
        forks[1]["x"]
    assert forks[0].error() is None
    assert isinstance(forks[1].error(), rt.BackendError)
    assert isinstance(state.error(), rt.BackendError)


def test_a_failed_branch_fails_the_join(scripted):
    def answer(prompt: str):
        return rt.BackendError("bad branch") if prompt.endswith("1") else "fine"

    def body(s):
        forks = s.fork(2)
        forks += lambda i: f"{i}" + rt.gen("x")
        forks.join()
        s += "after" + rt.gen("y")

    state = _run(body, scripted({"x": answer, "y": "Y"}))
    for read in (lambda: state["x"], lambda: state["y"], state.text):
        with pytest.raises(rt.BackendError, match="bad branch"):
            read()


def test_values_travel_between_branches_by_reference(scripted, spy):
    backend = spy({"x": "1", "y": "2"})

    def body(s):
        one, two = s.fork(2)
        one += "a" + rt.gen("x")
        two += "b" + one.ref("x") + rt.gen("y")
        s += f"{one.ref('x')}/{two.ref('y')}"

    state = _run(body, backend)
    assert state.text() == "1/2"
    assert len(backend.sent) == 1
