"""The warm-up of role train: conversations of the campaign's data, as the trajectories of its first steps.

    WarmupData             the conversations of each step, chosen by the step's number alone
    tokenize_conversation  a conversation -> a trajectory without log-probs, as the trainer reads it
    restore_trajectory     the same of a recorded trajectory, with its tokens

Every rank tokenizes the conversations of its own share; nothing else is kept, so a resumed campaign continues with the
same conversations.

Each answer follows the prompt that the model would be given for it, up to where it starts to generate, and ends with
the token at which the model stops: the ids are those of a rollout in which the model gave these answers. Where the
template shows the model another history than it rendered before, as when it leaves out old thoughts, the conversation
continues in another row.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.config.recipe import Recipe, WarmupConfig, make_warmup_settings
from hpcrl.envs.task_set import WARMUP_ROWS, TaskRows
from hpcrl.errors import ConfigError, TrainError
from hpcrl.models.chat_layout import load_chat_template
from hpcrl.models.chat_template import ChatTemplate
from hpcrl.models.conversation_data import TrainingConversation, parse_conversation
from hpcrl.models.message_form import Message
from hpcrl.rollout.agents.answer_parser import add_call_form
from hpcrl.rollout.tasks import RowOrder
from hpcrl.spool.ids import get_index, make_episode_id
from hpcrl.spool.record import ConversationRow, EpisodeTurn, Trajectory

if TYPE_CHECKING:
    from hpcrl.learn.distribute import ShareItem  # its package needs torch, and a check of the data has none

WARMUP_DOMAIN = "warmup"


class WarmupData:
    """The conversations of a campaign's warm-up; every rank has one."""

    def __init__(self, campaign: CampaignDir, recipe: Recipe, warmup: WarmupConfig) -> None:
        """Open the data; the model directory must exist."""
        self.num_steps = warmup.steps
        self.train = make_warmup_settings(recipe.train, warmup)
        self._per_step = warmup.conversations_per_step
        self._rows = TaskRows(campaign.warmup, domain=WARMUP_ROWS, split="train")
        key = f"{recipe.seed}/{WARMUP_DOMAIN}" if warmup.shuffle else None
        self._order = RowOrder(num_rows=len(self._rows), shuffle_key=key)
        self._template = add_call_form(load_chat_template(campaign.model, recipe.model), recipe.engine)

    def covers(self, step: int) -> bool:
        """Return whether a step, counted from 1, is one of the warm-up."""
        return step <= self.num_steps

    def choose(self, step: int) -> list[Trajectory]:
        """Return the conversations of a step."""
        first = (step - 1) * self._per_step
        return [self._tokenize(make_episode_id(WARMUP_DOMAIN, place)) for place in range(first, first + self._per_step)]

    def fetch(self, items: "Sequence[ShareItem]") -> list[Trajectory]:
        """Return the conversations of a share's items."""
        made = {name: self._tokenize(name) for name in {item.id for item in items}}
        return [made[item.id] for item in items]

    def _tokenize(self, name: str) -> Trajectory:
        """Tokenize the conversation at the place that its id has; in every epoch, an id names another row."""
        row = self._order.find_row(get_index(name))
        fields = self._rows.read_row(row)
        if "token_ids" in fields:
            return restore_trajectory(fields, name=name, domain=WARMUP_DOMAIN)
        try:
            conversation = parse_conversation(fields)
            return tokenize_conversation(conversation, template=self._template, name=name, domain=WARMUP_DOMAIN)
        except ConfigError as error:
            raise TrainError(f"warmup.path: row {row} cannot be trained on: {error}") from error


def tokenize_conversation(
    conversation: TrainingConversation, *, template: ChatTemplate, name: str, domain: str
) -> Trajectory:
    """Return the conversation with reward 1 and the id `name`; ConfigError if the template cannot render it."""
    ids: list[int] = []
    turns: list[EpisodeTurn] = []
    rows: list[ConversationRow] = []
    generated: list[int] = []
    shown = ""
    """The text of the row so far."""
    messages = [{key: value for key, value in m.items() if key != "weight"} for m in conversation.messages]
    for place, message in enumerate(conversation.messages):
        if message["role"] != "assistant":
            continue
        prompt = template.render(messages[:place], tools=conversation.tools)
        answer = _cut_answer(template, messages[: place + 1], prompt=prompt, tools=conversation.tools)
        if turns and not prompt.startswith(shown):
            rows.append(ConversationRow(end=len(ids)))
            shown = ""
            generated = []
        ids += template.drop_closing(template.encode(prompt[len(shown) :]), generated)
        generated = template.encode(answer)
        if not generated or generated[-1] not in template.stop_token_ids:
            generated.append(
                _find_stop(template, messages[: place + 2], shown=prompt + answer, tools=conversation.tools)
            )
        masked = "" if conversation.is_trained(message) else "choice"
        turns.append(EpisodeTurn(start=len(ids), end=len(ids) + len(generated), row=len(rows), masked=masked))
        ids += generated
        shown = prompt + answer
    rows = [*rows, ConversationRow(end=len(ids))] if rows else []
    trained = [(turn.start, turn.end) for turn in turns if not turn.masked]
    return _make_trajectory(ids, trained, turns=turns, rows=rows, name=name, domain=domain)


def restore_trajectory(fields: dict[str, Any], *, name: str, domain: str) -> Trajectory:
    """Return the trajectory of a campaign, as `hpcrl.traj.imitation` wrote its row, with reward 1 and the id `name`."""
    turns = msgspec.convert(fields["turns"], list[EpisodeTurn])
    rows = msgspec.convert(fields["rows"], list[ConversationRow])
    return _make_trajectory(fields["token_ids"], fields["trained"], turns=turns, rows=rows, name=name, domain=domain)


def _make_trajectory(
    ids: Sequence[int],
    trained: Sequence[Sequence[int]],
    *,
    turns: list[EpisodeTurn],
    rows: list[ConversationRow],
    name: str,
    domain: str,
) -> Trajectory:
    """Make a trajectory that earned 1; the tokens of the spans `trained` are imitated."""
    loss_mask = np.zeros(len(ids), np.bool_)
    for start, end in trained:
        loss_mask[start:end] = True
    return Trajectory(
        id=name,
        group=name,
        domain=domain,
        seed=0,
        status="done",
        producer=domain,
        created=0.0,
        start_version=0,
        end_version=0,
        turns=turns,
        rows=rows,
        reward=1.0,
        token_ids=np.asarray(ids, np.int32),
        logprobs=np.zeros(len(ids), np.float32),
        versions=np.zeros(len(ids), np.int32),
        loss_mask=loss_mask,
    )


def _cut_answer(template: ChatTemplate, messages: Sequence[Message], *, prompt: str, tools: Sequence[Any]) -> str:
    """Return the text of the last message, as the model generates it after the prompt."""
    whole = template.render(messages, tools=tools, opens_answer=False)
    if not whole.startswith(prompt):
        raise ConfigError(
            f"{template.source}: its chat template renders message {len(messages) - 1} in another way than after a "
            f"prompt, which ends in {prompt[-30:]!r}: give the answer's thought (reasoning_content), set what the "
            "prompt opens with model.chat_template_kwargs, or set model.chat_template"
        )
    answer = whole[len(prompt) :]
    ends = [
        place.end for place in template.encode_marks(answer)[1] if _is_stop(template, answer[place.start : place.end])
    ]
    return answer[: max(ends)] if ends else answer.rstrip("\n")


def _find_stop(template: ChatTemplate, messages: Sequence[Message], *, shown: str, tools: Sequence[Any]) -> int:
    """Return the token that ends an answer of a template that writes none: the next message's mark may be one."""
    after = template.render(messages, tools=tools, opens_answer=False)
    marks = template.encode_marks(after[len(shown) :])[1] if after.startswith(shown) else []
    first = after[len(shown) :][marks[0].start : marks[0].end] if marks else ""
    return template.mark_ids[first] if first and _is_stop(template, first) else template.stop_token_ids[0]


def _is_stop(template: ChatTemplate, mark: str) -> bool:
    return template.mark_ids[mark] in template.stop_token_ids
