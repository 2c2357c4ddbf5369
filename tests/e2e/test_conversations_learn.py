"""An agent with a sub-agent and a compacted history learns if all its conversations are trained, and not if one is.

The reward depends on two short conversations beside a long one: the sub-agent should answer with a letter, the agent
with a digit once its history was compacted. What it writes before does not matter.
"""

import asyncio
import statistics
from pathlib import Path

import msgspec
import pytest
import torch

from hpcrl.config.recipe import TinyModel, TrainConfig
from hpcrl.engines.base import GenerateRequest
from hpcrl.engines.embedded.engine import EmbeddedEngine, load_model
from hpcrl.models.chat_layout import load_chat_template
from hpcrl.models.tiny import make_tiny_model
from hpcrl.rollout.agents.episode_record import EpisodeFacts, build_record
from hpcrl.rollout.agents.recording import ConversationRecording
from hpcrl.rollout.tasks import stable_hash
from hpcrl.spool.record import Trajectory
from hpcrl.testing.memory import MemoryStore
from hpcrl.trainers.torch import TorchTrainer
from hpcrl.weights.versions import WeightVersion

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

NUM_STEPS = 25
GROUP = 8
GROUPS = 4
LAST = 5
"""The number of first and of final steps to average."""


class AgentEpisode:
    """One episode of the agent: a long conversation, then the two that decide the reward."""

    def __init__(self, engine, template, *, name, version):
        self.recording = ConversationRecording(template)
        self._engine, self._template, self._name, self._version = engine, template, name, version

    async def ask(self, messages, *, max_new_tokens):
        """Call the model as a program would; return the conversation with its answer."""
        prompt = self.recording.chat_prompt(messages, tools=None)
        number = len(self.recording.turns)
        completion = await self._engine.generate(
            GenerateRequest(
                request_id=f"{self._name}/0/{number}",
                token_ids=prompt.token_ids(),
                max_new_tokens=max_new_tokens,
                seed=stable_hash(self._name, number, bits=31),
                stop_token_ids=list(self._template.stop_token_ids),
            )
        )
        answer = {"role": "assistant", "content": self._template.decode(completion.token_ids)}
        self.recording.record_answer(prompt, completion, answer=answer, is_trained=True, started_at=0.0, generate_s=0.0)
        return [*messages, answer]

    async def play(self, *, group, index, choice) -> Trajectory:
        talk = await self.ask([{"role": "user", "content": "plan"}], max_new_tokens=2)
        await self.ask([*talk, {"role": "user", "content": "go on"}], max_new_tokens=2)
        helped = await self.ask([{"role": "user", "content": "sub"}], max_new_tokens=1)
        ended = await self.ask([{"role": "user", "content": "so far: ok"}], max_new_tokens=1)
        reward = 0.5 * helped[-1]["content"].islower() + 0.5 * ended[-1]["content"].isdigit()
        facts = EpisodeFacts(
            id=f"{group}/{index}",
            group=group,
            domain="agent",
            seed=0,
            status="done",
            producer="000-env-0",
            start_version=self._version,
            started_at=0.0,
            ended_at=0.0,
        )
        record = build_record(self.recording.turns, facts, reward=reward, choice=choice)
        return msgspec.structs.replace(record, reward=reward)


async def train_agent(directory: Path, *, choice: str) -> list[float]:
    """Return the mean reward of each step's batch."""
    settings = {"num_steps": NUM_STEPS, "groups_per_step": GROUPS, "learning_rate": 1e-2, "aggregation": "sequence"}
    trainer = TorchTrainer(directory, TrainConfig(**settings), seed=0)
    template, store, rewards = load_chat_template(directory), MemoryStore(), []
    store.publish(trainer.tensors(), WeightVersion(version=0, step=0))
    async with EmbeddedEngine(load_model(directory), store=store, max_batch=GROUPS * GROUP) as engine:
        for step in range(NUM_STEPS):
            names = [(f"agent/{step * GROUPS + number}", index) for number in range(GROUPS) for index in range(GROUP)]
            episodes = [AgentEpisode(engine, template, name=f"{group}/{index}", version=step) for group, index in names]
            played = await asyncio.gather(
                *(
                    episode.play(group=group, index=index, choice=choice)
                    for episode, (group, index) in zip(episodes, names, strict=True)
                )
            )
            rewards.append(statistics.mean(one.reward for one in played))
            metrics = trainer.train_step(played, step=step + 1, version=step)
            assert metrics.num_rows == (3 if choice == "all" else 1) * len(played)
            store.publish(trainer.tensors(), WeightVersion(version=step + 1, step=step + 1))
            await engine.load_version(step + 1)
    return rewards


@pytest.mark.parametrize(("choice", "learns"), [("all", True), ("longest", False)])
def test_conversations_beside_the_longest_are_learned_from_only_if_all_are_trained(tmp_path, choice, learns):
    torch.set_num_threads(1)
    make_tiny_model(tmp_path / "model", TinyModel(), seed=0)
    rewards = asyncio.run(train_agent(tmp_path / "model", choice=choice))
    assert statistics.mean(rewards[:LAST]) < 0.5
    assert (statistics.mean(rewards[-LAST:]) > 0.6) == learns, rewards
