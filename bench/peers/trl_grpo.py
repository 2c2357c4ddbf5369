"""TRL's GRPOTrainer on the tasks of bench.whole: `python -m bench.peers.trl_grpo MODEL SECONDS TASK [REWARD STEPS]`.

It runs in the virtual environment of TRL (`make .venv-trl/.done`). The task with slow environments is played by a
`rollout_func`, TRL's way to several turns in which the trainer's own code calls the environment: all episodes of a step
generate together, then their environments answer at the same time. It ends once the mean reward of the last STEPS is
REWARD, or after SECONDS. Prints JSON lines.
"""

import asyncio
import json
import math
import os
import random
import resource
import sys
import tempfile
import time
from collections import deque
from typing import Any

from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from bench.campaigns.tasks import (
    GROUP_SIZE,
    GROUPS_PER_STEP,
    LEARNING_RATE,
    MAX_TERM,
    NUM_TURNS,
    draw_delay_s,
    draw_sum,
    score_answer,
)

NUM_ROWS = 4096
MAX_STEPS = 1_000_000


class StepReport(TrainerCallback):  # type: ignore[misc]
    """Prints the end of each step, and ends training in time."""

    def __init__(self, ends_at: float, rewards: list[float], *, goal: float, num_recent: int) -> None:
        self._ends_at, self._goal = ends_at, goal
        self._recent: deque[float] = deque(maxlen=num_recent)
        self._rewards = rewards

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        mean = sum(self._rewards) / max(len(self._rewards), 1)
        self._rewards.clear()
        print(json.dumps([time.monotonic(), usage.ru_utime + usage.ru_stime, mean]), flush=True)
        self._recent.append(mean)
        is_reached = len(self._recent) == self._recent.maxlen and sum(self._recent) / len(self._recent) >= self._goal
        control.should_training_stop = is_reached or time.monotonic() > self._ends_at


def main() -> None:
    model, seconds, task = sys.argv[1], float(sys.argv[2]), sys.argv[3]
    goal, num_recent = (float(sys.argv[4]), int(sys.argv[5])) if len(sys.argv) > 4 else (math.inf, 1)
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
    rewards: list[float] = []

    def give_rewards(completions: list[Any], **columns: Any) -> list[float]:
        given = columns.get("earned")
        if given is None:
            texts = [completion[0]["content"] for completion in completions]
            given = [score_answer(text, right) for text, right in zip(texts, columns["right"], strict=True)]
        rewards.extend(given)
        return list(given)

    rng = random.Random(0)
    rows = [
        {"prompt": [{"role": "user", "content": question}], "right": right}
        for question, right in (draw_sum(rng) for _ in range(NUM_ROWS))
    ]
    with tempfile.TemporaryDirectory() as directory:
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=give_rewards,
            args=GRPOConfig(
                output_dir=directory,
                per_device_train_batch_size=GROUP_SIZE * GROUPS_PER_STEP,
                num_generations=GROUP_SIZE,
                max_completion_length=1,
                learning_rate=LEARNING_RATE,
                lr_scheduler_type="constant",
                max_steps=MAX_STEPS,
                logging_steps=MAX_STEPS,
                save_strategy="no",
                report_to="none",
                use_cpu=True,
                bf16=False,
                gradient_checkpointing=False,
                disable_tqdm=True,
            ),
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
            callbacks=[StepReport(time.monotonic() + seconds, rewards, goal=goal, num_recent=num_recent)],
            rollout_func=play_slow_sums if task == "slow" else None,
        )
        trainer.train()


def play_slow_sums(prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
    """Play the episodes of a step in turns: all generate together, then all environments answer."""
    tokenizer = trainer.processing_class
    episodes = [_Episode(tokenizer, prompt) for prompt in prompts]
    for _ in range(NUM_TURNS):
        answers, logprobs = trainer._generate_single_turn([one.context for one in episodes], None, {}, 1)
        asyncio.run(_answer_all(episodes, answers, logprobs))
    return {
        "prompt_ids": [one.prompt_ids for one in episodes],
        "completion_ids": [one.completion_ids for one in episodes],
        "logprobs": [one.logprobs for one in episodes],
        "env_mask": [one.mask for one in episodes],
        "earned": [one.reward for one in episodes],
    }


async def _answer_all(episodes: "list[_Episode]", answers: list[list[int]], logprobs: Any) -> None:
    await asyncio.gather(*(one.step(ids) for one, ids in zip(episodes, answers, strict=True)))


class _Episode:
    """One episode: its tokens, which of them the model generated, and its reward."""

    def __init__(self, tokenizer: Any, prompt: Any) -> None:
        self._tokenizer = tokenizer
        question = prompt[-1]["content"]
        self._right = sum(int(term) for term in question.rstrip("=").split("+"))
        self._rng = random.Random(question)  # members of a group have the same sums
        self.prompt_ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)
        self.context = list(self.prompt_ids)
        self.completion_ids: list[int] = []
        self.logprobs: list[float] = []
        self.mask: list[int] = []
        self.reward = 0.0

    async def step(self, token_ids: list[int]) -> None:
        await asyncio.sleep(draw_delay_s(random.Random()))
        self.reward += score_answer(self._tokenizer.decode(token_ids), self._right) / NUM_TURNS
        question, self._right = draw_sum(self._rng)
        observation = self._tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
        )
        self._add(token_ids, is_generated=1)
        if len(self.mask) < NUM_TURNS + (NUM_TURNS - 1) * len(observation):
            self._add(observation, is_generated=0)

    def _add(self, token_ids: list[int], *, is_generated: int) -> None:
        self.context += token_ids
        self.completion_ids += token_ids
        self.logprobs += [0.0] * len(token_ids)
        self.mask += [is_generated] * len(token_ids)


assert MAX_TERM * 2 < 10, "an answer is one token"

if __name__ == "__main__":
    main()
