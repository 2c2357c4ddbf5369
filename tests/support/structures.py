"""A structure with a handful of answers, so that what it allows next is found by trying them all."""

from typing import Any

import torch

from hpcrl.engines.base import ExactText, JsonValue, OutputStructure, PartChoice
from hpcrl.models.tiny_vocabulary import CHARACTERS, MARKS

TEXTS = ("yes", "no, never", 'no: "ab"', 'no: "ac"', "no: true")
SMALL = OutputStructure(
    parts=[
        PartChoice(
            alternatives=[
                [ExactText(text="yes")],
                [
                    ExactText(text="no"),
                    PartChoice(
                        alternatives=[
                            [ExactText(text=", never")],
                            [ExactText(text=": "), JsonValue(schema={"enum": ["ab", "ac", True]})],
                        ]
                    ),
                ],
            ]
        )
    ]
)


def encode(text: str) -> list[int]:
    """Return the tokens of a text in a tiny model."""
    return [len(MARKS) + CHARACTERS.index(character) for character in text]


def read_text(token_ids: list[int]) -> str:
    """Return the text of a tiny model's tokens."""
    return "".join([*MARKS, *CHARACTERS][token] for token in token_ids)


@torch.inference_mode()
def score_masked(model: Any, prompt: list[int], answer: list[int], *, stop: int, temperature: float) -> list[float]:
    """Return the log-probability of each token among those that continue one of TEXTS, from one forward pass."""
    logits_TV = model(input_ids=torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1].float()
    whole = [[*encode(text), stop] for text in TEXTS]
    found = []
    for at, token in enumerate(answer):
        allowed = sorted({ids[at] for ids in whole if ids[:at] == answer[:at] and len(ids) > at})
        scores = torch.log_softmax(logits_TV[at, allowed] / temperature, dim=-1)
        found.append(float(scores[allowed.index(token)]))
    return found
