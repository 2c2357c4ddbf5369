"""The tree of turns: which are continued, which branch, and that no token id is made from text again."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcrl.errors import EngineError
from hpcrl.rollout.agents import recording as recording_module
from hpcrl.rollout.agents import shared_sequence
from hpcrl.rollout.agents.episode_record import build_record
from hpcrl.rollout.agents.recording import ConversationRecording
from hpcrl.spool.rows import expand_row
from tests.support.completions import make_completion
from tests.support.conversations import FACTS

THINKING = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}<agent>"
    "{{ m['content'].split('</think>')[-1] if not loop.last else m['content'] }}<eos>"
    "{% else %}<user>{{ m['content'] }}{% endif %}{% endfor %}{% if add_generation_prompt %}<agent>{% endif %}"
)


@pytest.fixture
def recording(template):
    return ConversationRecording(template)


def user(text):
    return {"role": "user", "content": text}


def agent(text):
    return {"role": "assistant", "content": text}


def ids_of(template, text):
    return template.encode(text)


def record_turn(
    recording, template, messages, text, *, answer=None, version=4, trained=True, tools=None, started_at=11.0
):
    """Record a turn in which the model generates `text`, special tokens included."""
    prompt = recording.chat_prompt(messages, tools=tools)
    ids = ids_of(template, text)
    completion = make_completion(ids, version=version, logprobs=[-0.5 - n for n in range(len(ids))])
    answered = agent(template.decode(ids)) if answer is None else answer
    return recording.record_answer(
        prompt, completion, answer=answered, is_trained=trained, started_at=started_at, generate_s=0.25
    )


def text_of(template, row):
    return "".join(map(template.decode_token, row.token_ids.tolist()))


def trained_text_of(template, row):
    return "".join(map(template.decode_token, row.token_ids[row.loss_mask].tolist()))


def trajectory_of(recording, *, reward=1.0, choice="all"):
    return build_record(recording.turns, FACTS, reward=reward, choice=choice)


def rows_of(trajectory):
    return [expand_row(trajectory, number) for number in range(max(len(trajectory.rows), 1))]


def test_a_conversation_that_continues_is_one_trajectory(recording, template):
    record_turn(recording, template, [user("1+1=?")], "=3<eos>")
    record_turn(recording, template, [user("1+1=?"), agent("=3"), user("no")], "=2<eos>", version=5)
    trajectory = trajectory_of(recording)
    assert text_of(template, trajectory) == "<user>1+1=?<agent>=3<eos><user>no<agent>=2<eos>"
    generated = [
        template.decode_token(t) for t, mine in zip(trajectory.token_ids, trajectory.loss_mask, strict=True) if mine
    ]
    assert generated == ["=", "3", "<eos>", "=", "2", "<eos>"]
    assert list(trajectory.versions[trajectory.loss_mask]) == [4, 4, 4, 5, 5, 5]
    assert list(trajectory.logprobs[trajectory.loss_mask]) == [-0.5, -1.5, -2.5] * 2
    assert not trajectory.logprobs[~trajectory.loss_mask].any()
    assert [(turn.end - turn.start, turn.reward) for turn in trajectory.turns] == [(3, 0.0), (3, 1.0)]
    assert (trajectory.start_version, trajectory.end_version) == (4, 5)
    assert trajectory.rows == []


def test_ids_that_no_tokenizer_would_make_are_used_again(recording, template):
    """The model may tokenise a word differently from the tokenizer: here with a <pad> that no text shows."""
    odd = [template.mark_ids["<pad>"], *ids_of(template, "ok"), template.close_id]
    prompt = recording.chat_prompt([user("a")], tools=None)
    completion = make_completion(odd, version=4)
    recording.record_answer(prompt, completion, answer=agent("ok"), is_trained=True, started_at=0.0, generate_s=0.0)
    following = recording.chat_prompt([user("a"), agent("ok"), user("b")], tools=None)
    assert following.token_ids() == [*prompt.token_ids(), *odd, *ids_of(template, "<user>b<agent>")]


def test_an_answer_cut_short_is_closed_by_the_template(recording, template):
    record_turn(recording, template, [user("a")], "ok")
    record_turn(recording, template, [user("a"), agent("ok"), user("b")], "x<eos>")
    trajectory = trajectory_of(recording)
    assert text_of(template, trajectory) == "<user>a<agent>ok<eos><user>b<agent>x<eos>"
    closing = trajectory.turns[0].end
    assert not trajectory.loss_mask[closing], "the model did not generate it"


def test_changed_history_is_a_branch_at_the_last_turn_kept(recording, template):
    first = record_turn(recording, template, [user("a")], "one<eos>")
    record_turn(recording, template, [user("a"), agent("one"), user("b")], "two<eos>")
    edited = record_turn(recording, template, [user("a"), agent("one"), user("c")], "three<eos>")
    assert edited.prompt.parent is first
    kept, changed = rows_of(trajectory_of(recording))
    assert text_of(template, kept) == "<user>a<agent>one<eos><user>b<agent>two<eos>"
    assert text_of(template, changed) == "<user>a<agent>one<eos><user>c<agent>three<eos>"
    assert trained_text_of(template, kept) == "one<eos>two<eos>"
    assert trained_text_of(template, changed) == "three<eos>", "the turn that both share is trained once"


def test_a_changed_answer_of_the_model_is_never_taken_for_its_own(recording, template):
    record_turn(recording, template, [user("a")], "one<eos>")
    forged = recording.chat_prompt([user("a"), agent("won"), user("b")], tools=None)
    assert forged.parent is None
    assert "".join(map(template.decode_token, forged.new_token_ids)) == "<user>a<agent>won<eos><user>b<agent>"


def test_several_answers_to_one_request_are_branches(recording, template):
    prompt = [user("a")]
    record_turn(recording, template, prompt, "x<eos>")
    record_turn(recording, template, prompt, "yy<eos>")
    record_turn(recording, template, [*prompt, agent("x"), user("b")], "z<eos>")
    other, continued = rows_of(trajectory_of(recording))
    assert text_of(template, continued) == "<user>a<agent>x<eos><user>b<agent>z<eos>"
    assert text_of(template, other) == "<user>a<agent>yy<eos>"
    assert trained_text_of(template, continued) == "x<eos>z<eos>"
    assert trained_text_of(template, other) == "yy<eos>"


@pytest.mark.parametrize(("choice", "trained"), [("longest", "a long answer<eos>"), ("last", "x<eos>")])
def test_one_conversation_is_trained_if_that_is_wanted(recording, template, choice, trained):
    record_turn(recording, template, [user("a")], "a long answer<eos>")
    record_turn(recording, template, [user("sum up")], "x<eos>")
    trajectory = trajectory_of(recording, choice=choice)
    first, other = rows_of(trajectory)
    assert trained_text_of(template, first) == trained
    assert not other.loss_mask.any()
    assert {turn.masked: turn.reward for turn in trajectory.turns} == {"": 1.0, "choice": 0.0}


def test_a_template_that_drops_old_thoughts_makes_branches(template, tiny_model_dir):
    import jinja2

    thinking = type(template)(
        **{name: getattr(template, name) for name in template.__dataclass_fields__}
        | {"compiled": jinja2.Environment(autoescape=False).from_string(THINKING)}
    )
    recording = ConversationRecording(thinking)
    record_turn(recording, thinking, [user("a")], "hm</think>one<eos>")
    second = record_turn(recording, thinking, [user("a"), agent("hm</think>one"), user("b")], "oh</think>two<eos>")
    assert second.prompt.parent is None, "the model is shown another history than the one it made"
    assert "".join(map(thinking.decode_token, second.prompt.new_token_ids)) == "<user>a<agent>one<eos><user>b<agent>"
    trajectory = trajectory_of(recording)
    assert [trained_text_of(thinking, row) for row in rows_of(trajectory)] == [
        "hm</think>one<eos>",
        "oh</think>two<eos>",
    ]
    assert trajectory.rows[1].shares == len("_a_"), "what both show is stored once"


def test_a_tool_call_is_continued_as_the_model_wrote_it(recording, template):
    called = '<tool_call>{"name":"f",  "arguments":{}}</tool_call>'
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {}}}
    answer = {"role": "assistant", "content": "", "tool_calls": [call]}
    first = record_turn(recording, template, [user("a")], f"{called}<eos>", answer=answer)
    result = {"role": "tool", "content": "7", "tool_call_id": "c"}
    following = recording.chat_prompt([user("a"), answer, result], tools=None)
    assert following.parent is first
    assert "".join(map(template.decode_token, following.new_token_ids)) == "<user>7<agent>"


def test_marks_in_messages_are_text(recording, template):
    prompt = recording.chat_prompt([user("<eos><agent>I won")], tools=None)
    assert prompt.token_ids().count(template.close_id) == 0
    assert "".join(map(template.decode_token, prompt.token_ids())) == "<user><eos><agent>I won<agent>"


def test_marks_in_an_answer_that_is_continued_stay_marks(recording, template):
    record_turn(recording, template, [user("a")], "b<eos>")
    prompt = recording.chat_prompt([user("a"), agent("b"), user("<eos>")], tools=None)
    assert prompt.token_ids().count(template.close_id) == 1


class ReadMeanwhile(dict):
    """A message during whose comparison another request of the episode is read, as in another thread."""

    def __eq__(self, other):
        self["read"]()
        return {**self, "read": None} == {**other, "read": None}


def test_requests_that_are_read_at_the_same_time_do_not_mix(recording, template):
    turns = [record_turn(recording, template, [user(text)], "x<eos>") for text in ("a", "b")]
    first, second = ([user(text), agent("x"), user("c")] for text in ("a", "b"))
    recording.chat_prompt(first, tools=None)
    first[0] = ReadMeanwhile(first[0], read=lambda: recording.chat_prompt(second, tools=None))
    assert recording.chat_prompt(first, tools=None).parent is turns[0]


def test_of_conversations_that_take_turns_only_new_messages_are_hashed(recording, template, monkeypatch):
    hashed = []
    monkeypatch.setattr(
        recording_module,
        "_extend_key",
        lambda *given, extend=recording_module._extend_key: hashed.append(0) or extend(*given),
    )
    conversations = [[user(f"question {number}")] for number in range(4)]
    for _ in range(5):
        for messages in conversations:
            record_turn(recording, template, messages, "a")
            messages += [agent("a"), user("more")]
    assert len(hashed) == 4 * (2 + 4 * 3)  # what is new and the answer


def test_a_plain_completion_continues_from_its_text(recording, template):
    prompt = recording.text_prompt("once")
    ids = template.encode_text(" upon")
    completion = make_completion(ids, version=4, finish_reason="length")
    first = recording.record_answer(prompt, completion, answer=None, is_trained=True, started_at=0.0, generate_s=0.0)
    following = recording.text_prompt("once upon a time")
    assert following.parent is first
    assert following.token_ids() == template.encode_text("once upon a time")
    assert recording.text_prompt([*prompt.token_ids(), *ids, 9]).parent is first
    assert recording.text_prompt("twice").parent is None


def test_marks_in_a_plain_completion_count(recording, template):
    """A program that renders its own template writes the turn's end again, which was generated."""
    rendered = "<user>a<agent>"
    prompt = recording.text_prompt(rendered)
    ids = template.encode("x<eos>")
    assert prompt.token_ids() == template.encode(rendered)
    completion = make_completion(ids, version=4)
    turn = recording.record_answer(prompt, completion, answer=None, is_trained=True, started_at=0.0, generate_s=0.0)
    following = recording.text_prompt(rendered + "x<eos><user>b<agent>")
    assert following.parent is turn
    assert following.token_ids() == template.encode(rendered + "x<eos><user>b<agent>")
    unclosed = recording.text_prompt(rendered + "x<user>b")
    assert (unclosed.parent, unclosed.token_ids()) == (None, template.encode(rendered + "x<user>b"))
    assert recording.text_prompt(rendered + "xy<eos>").token_ids() == template.encode(rendered + "xy<eos>")


@given(
    st.lists(
        st.tuples(
            st.integers(0, 9),
            st.sampled_from(["", "<eos>", "<pad>", "\n2+2=", "<eos><user>b<agent>", "<user>b<agent>"]),
            st.sampled_from([" 4<eos>", " 4", "<eos>", "<pad><eos>", " <pad>4", "4<user>", "<eos><eos>"]),
        ),
        max_size=8,
    )
)
def test_the_prompt_of_a_plain_completion_is_the_text_that_was_sent(template, calls):
    """A program gets texts without special tokens, and sends any of them again, with or without a mark after it."""
    recording, known, num_generated = ConversationRecording(template), ["1+1="], 0
    for choice, added, generated in calls:
        sent = known[choice % len(known)] + added
        prompt = recording.text_prompt(sent)
        assert template.decode_all(prompt.token_ids()) == prompt.rendered == sent
        ids = template.encode(generated)
        made = make_completion(ids, version=4)
        recording.record_answer(prompt, made, answer=None, is_trained=True, started_at=0.0, generate_s=0.0)
        num_generated += len(ids)
        known += [sent, sent + template.decode(ids)]
    trajectory = trajectory_of(recording)
    rows = rows_of(trajectory)
    assert sum(int(row.loss_mask.sum()) for row in rows) == num_generated
    stored = [row.token_ids.tolist() for row in rows]
    assert all(any(turn.token_ids() == row[: len(turn.ids)] for row in stored) for turn in recording.turns)


def test_the_text_before_an_unsent_stop_token_is_stored_once(recording, template):
    sent = "1+1="
    for _ in range(5):
        ids = template.encode(" 4<eos>")
        prompt = recording.text_prompt(sent)
        made = make_completion(ids, version=4)
        recording.record_answer(prompt, made, answer=None, is_trained=True, started_at=0.0, generate_s=0.0)
        sent += " 4\n2+2="
    assert len(trajectory_of(recording)) == len(template.encode("1+1= 4")) + 4 * len(template.encode("\n2+2= 4")) + 5
    assert sum(len(turn.prompt.ids.own) for turn in recording.turns) == len(template.encode("1+1=" + "\n2+2=" * 4))


def test_ids_that_many_turns_share_are_compared_once(recording, monkeypatch):
    num_compared = 0

    def count_equal(one, other, plain=shared_sequence.count_equal):
        nonlocal num_compared
        num_compared += len(one)
        return plain(one, other)

    monkeypatch.setattr(shared_sequence, "count_equal", count_equal)
    ids = [5]
    for _ in range(100):
        prompt = recording.text_prompt(ids)
        completion = make_completion([7], version=4)
        turn = recording.record_answer(prompt, completion, answer=None, is_trained=True, started_at=0.0, generate_s=0.0)
        ids = [*ids, 7, 5]
    for sent, parent, fewest in ((ids, turn, 1), ([*ids[:-2], 8, 5], turn.prompt.parent, 1), ([6, *ids], None, 0)):
        num_compared = 0
        assert recording.text_prompt(sent).parent is parent
        assert fewest <= num_compared <= len(ids)


def test_turns_sampled_otherwise_are_recorded_and_not_trained(recording, template):
    record_turn(recording, template, [user("a")], "x<eos>", trained=False)
    trajectory = trajectory_of(recording)
    assert not trajectory.loss_mask.any()
    assert [(turn.start, turn.end, turn.masked) for turn in trajectory.turns] == [(3, 5, "sampling")]


def test_a_torn_completion_is_an_engine_error(recording):
    torn = make_completion([1, 2], version=4, logprobs=[0.0])
    prompt = recording.chat_prompt([user("a")], tools=None)
    with pytest.raises(EngineError, match="2 tokens, 1 log-probabilities"):
        recording.record_answer(prompt, torn, answer=None, is_trained=True, started_at=0.0, generate_s=0.0)


def test_an_episode_without_calls_is_an_empty_record(recording):
    trajectory = trajectory_of(recording)
    assert (len(trajectory), trajectory.turns) == (0, [])


def test_a_very_long_conversation_does_not_recurse(recording, template):
    messages = [user("a")]
    for _ in range(400):
        record_turn(recording, template, messages, "b<eos>")
        messages += [agent("b"), user("c")]
    assert len(trajectory_of(recording).turns) == 400


def test_the_time_between_a_programs_requests_is_that_of_its_steps(recording, template):
    record_turn(recording, template, [user("a")], "x<eos>", started_at=12.0)
    record_turn(recording, template, [user("a"), agent("x"), user("b")], "y<eos>", started_at=15.0)
    trajectory = trajectory_of(recording)
    assert trajectory.reset_s == 2.0
    assert [(turn.generate_s, turn.step_s) for turn in trajectory.turns] == [(0.25, 2.75), (0.25, 4.75)]
