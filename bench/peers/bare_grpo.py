"""A bare GRPO loop in one process, with nothing that survives it: `python -m bench.peers.bare_grpo MODEL SECONDS`.

The one-token task of bench.whole: a forward pass samples 64 answers, another one trains on them. Prints JSON lines.
"""

import json
import random
import resource
import sys
import time

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from bench.campaigns.tasks import GROUP_SIZE, GROUPS_PER_STEP, LEARNING_RATE, draw_sum, score_answer


def main() -> None:
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
    tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    rng, ends_at = random.Random(0), time.monotonic() + float(sys.argv[2])
    while time.monotonic() < ends_at:
        sums = [one for one in (draw_sum(rng) for _ in range(GROUPS_PER_STEP)) for _ in range(GROUP_SIZE)]
        prompts = [[{"role": "user", "content": question}] for question, _ in sums]
        encoded = tokenizer.apply_chat_template(
            prompts, add_generation_prompt=True, return_tensors="pt", return_dict=True, padding=True
        )
        with torch.no_grad():
            tokens = torch.distributions.Categorical(logits=model(**encoded).logits[:, -1]).sample()  # type: ignore[no-untyped-call]
        answers = tokenizer.batch_decode(tokens[:, None])
        rewards = torch.tensor([score_answer(text, right) for text, (_, right) in zip(answers, sums, strict=True)])
        groups = rewards.view(GROUPS_PER_STEP, GROUP_SIZE)
        advantages = ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)).flatten()
        logprobs = torch.log_softmax(model(**encoded).logits[:, -1], dim=-1).gather(1, tokens[:, None])[:, 0]
        loss = -(torch.exp(logprobs - logprobs.detach()) * advantages).mean()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        report(rewards.mean().item())


def report(reward: float) -> None:
    """Print the end of a step: the time, the CPU time of this process, the mean reward."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    print(json.dumps([time.monotonic(), usage.ru_utime + usage.ru_stime, reward]), flush=True)


if __name__ == "__main__":
    main()
