"""Remakes the golden references from transformers' own greedy generation in float32.

    python tests/golden/remake.py [MODEL_FOLDER] [OUTPUT]

For every prompt: its ids, what was generated, and for each generated token the margin between the two best logits, so that a
test can tell a near-tie (where two correct engines may differ) from a wrong token.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, str(Path(__file__).parent))
from prompts import Prompt, golden_prompts

MAX_TOKENS = 32
DEFAULT_MODEL = Path("~/.cache/decant/models/SmolLM2-135M-Instruct").expanduser()
DEFAULT_OUTPUT = Path(__file__).parent / "smollm2-135m-instruct.json"


def prompt_ids(tokenizer: Any, prompt: Prompt) -> list[int]:
    if prompt.chat:
        messages = [{"role": "user", "content": prompt.text}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    else:
        ids = tokenizer.encode(prompt.text)
    if prompt.length is not None:
        assert len(ids) >= prompt.length, f"{prompt.name}: {len(ids)} tokens, {prompt.length} wanted"
        ids = ids[: prompt.length]
    return list(ids)


def reference(model: Any, tokenizer: Any, prompt: Prompt) -> dict[str, Any]:
    ids = prompt_ids(tokenizer, prompt)
    out = model.generate(
        torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.long),
        max_new_tokens=MAX_TOKENS,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )
    generated = out.sequences[0, len(ids) :].tolist()
    best_two = torch.stack([logits[0] for logits in out.logits]).topk(2).values
    text = prompt.text if prompt.length is None else tokenizer.decode(ids)
    survives = prompt.chat or tokenizer.encode(text) == ids
    return {
        "name": prompt.name,
        "chat": prompt.chat,
        "text": text if survives else None,
        "prompt_ids": ids,
        "output_ids": generated,
        "margins": [round(float(m), 6) for m in best_two[:, 0] - best_two[:, 1]],
        "output_text": tokenizer.decode(generated, skip_special_tokens=True),
        "finish_reason": "stop" if generated[-1] == model.generation_config.eos_token_id else "length",
    }


def main(arguments: list[str]) -> None:
    model_folder = Path(arguments[0]) if arguments else DEFAULT_MODEL
    output = Path(arguments[1]) if len(arguments) > 1 else DEFAULT_OUTPUT
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    model.train(False)
    references = []
    for prompt in golden_prompts():
        started_s = time.monotonic()
        references.append(reference(model, tokenizer, prompt))
        count = len(references[-1]["prompt_ids"])
        sys.stderr.write(f"{prompt.name}: {count} tokens, {time.monotonic() - started_s:.1f} s\n")
    lines = ",\n".join(json.dumps(entry, ensure_ascii=False) for entry in references)
    header = json.dumps({"model": model_folder.name, "dtype": "float32", "max_tokens": MAX_TOKENS})[:-1]
    output.write_text(f'{header}, "references": [\n{lines}\n]}}\n', encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
