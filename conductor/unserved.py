"""Fields of OpenAI's or vLLM's interface that are not served: refused by name, never ignored in silence.

A field is refused only if its value would change the answer: null, and the values listed beside its name,
ask for nothing.
"""

from typing import Any

from conductor.problem import Problem, invalid

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "allowed_token_ids": (),
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "include_stop_str_in_output": (False,),
    "kv_transfer_params": ({},),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "logits_processors": ([],),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "prediction": (),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "reasoning_effort": ("none",),
    "response_format": ({"type": "text"},),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "skip_special_tokens": (True,),
    "structured_outputs": ({},),
    "suffix": ("",),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "vllm_xargs": ({},),
    "web_search_options": (),
}
"""Field -> the values (besides null) that leave the answer as it is."""

GUIDED = "guided_"
"""vLLM's older family of structured outputs: guided_json, guided_regex, guided_choice, ..."""


def require_served(body: dict[str, Any], adds_special_tokens: bool) -> None:
    """Raises Problem naming the first field that asks for something that is not served."""
    if body.get("add_special_tokens") not in (None, adds_special_tokens):
        raise _unserved("add_special_tokens")
    for name, value in body.items():
        if value is None:
            continue
        known = name in NEUTRAL or name.startswith(GUIDED)
        if known and value not in NEUTRAL.get(name, ()):
            raise _unserved(name)
    choice = body.get("tool_choice")
    if body.get("tools") and choice != "none":
        raise _unserved("tools")
    if choice not in (None, "none", "auto"):  # without tools, `auto` asks for nothing either
        raise _unserved("tool_choice")


def _unserved(name: str) -> Problem:
    return invalid(f"{name!r} is not served here; leave it out.", name, "unsupported_parameter")
