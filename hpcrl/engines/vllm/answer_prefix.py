"""Structured answers whose first tokens are in the prompt, from another engine: vLLM's grammars do not see them there.

continue_answers  make vLLM's grammars start after these tokens; for hpcrl.engines.vllm.weight_plugin
"""

import functools
from typing import Any

from vllm.v1.structured_output.backend_guidance import GuidanceBackend

from hpcrl.engines.structure import read_answered

_original = GuidanceBackend.compile_grammar


def continue_answers() -> None:
    """Replace the function of vLLM's backend that compiles a grammar."""
    GuidanceBackend.compile_grammar = _compile_grammar


@functools.wraps(_original)
def _compile_grammar(self: Any, request_type: Any, grammar_spec: str, *args: Any, **options: Any) -> Any:
    """Compile a grammar and advance it over the tokens named in it."""
    grammar = _original(self, request_type, grammar_spec, *args, **options)
    answered = read_answered(grammar_spec)
    if answered and not grammar.accept_tokens("answered", answered):
        raise ValueError(f"the {len(answered)} tokens of the answer so far do not match its structure")
    return grammar
