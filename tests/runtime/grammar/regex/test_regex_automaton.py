"""The automaton over bytes: what it forces, how large it is, and that others agree with it."""

from __future__ import annotations

import interegular
import numpy as np
import outlines_core
import pytest
from ramet.runtime.grammar.automaton import DEAD, ByteAutomaton, TooLarge, build
from ramet.runtime.grammar.checks_regex import check_regex
from ramet.runtime.grammar.regex_tree import NOTHING


def of(pattern: str) -> ByteAutomaton:
    return build(check_regex(pattern).tree)


@pytest.mark.parametrize(
    ("pattern", "before", "forced"),
    [
        ("hello", "", "hello"),
        ("(yes|yet)", "", "ye"),
        ("(yes|yes please)", "", "yes"),
        ("(yes|yes please)", "yes ", "please"),
        ("a?b", "", ""),
        ("ab*", "", "a"),
        ("", "", ""),
        ('\\{"a": [0-9]+, "b": true\\}', "", '{"a": '),
        ('\\{"a": [0-9]+, "b": true\\}', '{"a": 1,', ' "b": true}'),
        ("(ab){3}c", "a", "bababc"),
        ("[é]x", "", "éx"),
    ],
)
def test_bytes_are_forced_up_to_a_choice_or_an_end(pattern, before, forced):
    automaton = of(pattern)
    state = automaton.walk(0, before.encode())
    data, behind = automaton.forced(state)
    assert data == forced.encode()
    assert automaton.walk(state, data) == behind


def test_bytes_may_be_forced_inside_of_a_character():
    assert of("(霍格|霍比)").forced(0)[0] == "霍".encode() + b"\xe6"
    assert "格".encode()[:1] == "比".encode()[:1] == b"\xe6"


@pytest.mark.parametrize("pattern", ["ab(c|d)e*f", "(ab)*", "[0-9]{2,4}x|[0-9]y", "a.b", "(a|b)?c"])
def test_interegular_reads_the_same_language(pattern):
    """Its own reading of the pattern, over characters, against ours over bytes."""
    theirs = interegular.parse_pattern(pattern).to_fsm().reduce()
    mine = of(pattern)
    letters = "abcdefxy019"
    texts = [""]
    for text in texts:  # grows while it is walked
        state = mine.walk(0, text.encode())
        assert (state != DEAD and mine.is_final(state)) == theirs.accepts(text), text
        if state != DEAD and len(text) < 5:
            texts += [text + letter for letter in letters]
    assert not mine.fsm().empty()


def test_as_interegulars_fsm_it_yields_shortest_matches():
    fsm = of("(ab|é){2}").fsm()
    words = [bytes(word).decode() for word, _ in zip(fsm.strings(), range(4))]
    assert sorted(words) == sorted(["abab", "abé", "éab", "éé"])
    assert [len(w.encode()) for w in words] == [4, 4, 4, 4]
    assert fsm.accepts([0x61, 0x62, 0xC3, 0xA9]) and not fsm.accepts([0xC3])


@pytest.mark.parametrize(
    "pattern",
    [
        '\\{"name": "[a-z]{1,5}", "n": -?[0-9]+\\}',
        "(霍格沃茨特快列车|霍比特人比尔博)",
        r"(\w+ )?x",
        r"(January|June|July) [0-9]{1,2}(st|th)?",
        "a(bc|[^b]c)*d?",
        ".{1,3}end",
    ],
)
def test_the_index_forces_the_same_bytes(pattern, single_bytes):
    """outlines-core's index, followed over tokens of one byte, is the oracle of every state."""
    ids = {data: [i] for i, data in enumerate(single_bytes.tokens) if data}
    spelled = check_regex(pattern).pattern
    index = outlines_core.Index(f"#(?:{spelled})\\z", outlines_core.Vocabulary(300, ids))
    start = index.get_next_state(index.get_initial_state(), ord("#"))
    mine = of(pattern)
    seen = {(start, 0)}
    todo = [(start, 0)]
    while todo:
        theirs, state = todo.pop()
        following = [t for t in index.get_allowed_tokens(theirs) or () if t < 256]
        assert sorted(following) == mine.next_bytes(state)
        assert index.is_final_state(theirs) == mine.is_final(state)
        data, _ = mine.forced(state)
        only = len(following) == 1 and not mine.is_final(state)
        assert data[:1] == (bytes(following) if only else b"")
        for byte in following:
            pair = (index.get_next_state(theirs, byte), mine.next(state, byte))
            if pair not in seen:
                seen.add(pair)
                todo.append(pair)
    assert {state for _, state in seen} == set(range(mine.states))


def test_every_state_leads_to_a_match():
    for pattern in (r"(a|bc)*d[^x]{2}|\d+", r"a[^\s\S]|bc", "(a?){20}"):
        automaton = of(pattern)
        reaching = set(np.flatnonzero(automaton.finals).tolist())
        for _ in range(automaton.states):
            reaching |= {
                s for s in range(automaton.states) if reaching & set(automaton.table[s].tolist())
            }
        assert reaching == set(range(automaton.states))


def test_it_crosses_a_process_as_bytes():
    one = of(r"(ab|é+)\d{2}")
    other = ByteAutomaton.unpack(one.pack())
    assert other.classes == one.classes
    assert (other.table == one.table).all() and (other.finals == one.finals).all()
    assert other.walk(0, "é1".encode()) == one.walk(0, "é1".encode()) != DEAD


@pytest.mark.parametrize(
    "pattern", ["[ab]*a[ab]{20}", "(a{100}){100}", r"\w{0,100}", "((a|b|c){1,200}d){1,200}"]
)
def test_what_would_explode_is_given_up_early(pattern):
    with pytest.raises(TooLarge):
        of(pattern)


def test_sizes_are_estimated():
    assert of("[a-z]{50}").states == 51
    assert check_regex("(ab){5}c").size == 11


def test_the_empty_language_has_an_automaton_without_ends():
    automaton = build(NOTHING)
    assert not automaton.finals.any() and automaton.fsm().empty()
    assert not of("").fsm().empty()
