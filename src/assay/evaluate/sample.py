"""Text that a model writes: one token after another, drawn with a seed.

The same model, prompt and seed give the same text on one device kind. No cache is kept, so it is for short
samples, not for serving.
"""

from __future__ import annotations

import torch

from assay.corpus.tokenizer import Tokenizer
from assay.model.decoder import Decoder


@torch.no_grad()
def sample(
    model: Decoder, tokenizer: Tokenizer, prompt: str, tokens: int, temperature: float = 0.8, seed: int = 0
) -> str:
    """The prompt and up to `tokens` further tokens as text; it ends early where the model ends the document.

    The ids begin with the end of text, as every document in training does but the first. `temperature` 0
    takes the likeliest token each time. Only the last `block` ids are seen.
    """
    device = model.embedding.weight.device
    generator = torch.Generator().manual_seed(seed)
    ids = [tokenizer.end_of_text, *tokenizer.inner.encode(prompt, add_special_tokens=False).ids]
    for _ in range(tokens):
        seen = torch.tensor([ids[-model.config.block :]], device=device)
        # The whole context is one document: the leading end of text belongs to the one before.
        documents = torch.ones_like(seen) if model.config.document_mask else None
        if documents is not None and len(ids) <= model.config.block:
            documents[0, 0] = 0
        logits = model.logits(model(seen, documents)[0, -1]).float().cpu()
        logits[tokenizer.vocabulary :] = -torch.inf  # ids that no text has
        if temperature > 0:
            chances = torch.softmax(logits / temperature, dim=-1)
            following = int(torch.multinomial(chances, 1, generator=generator))
        else:
            following = int(logits.argmax())
        if following == tokenizer.end_of_text:
            break
        ids.append(following)
    return str(tokenizer.inner.decode(ids[1:], skip_special_tokens=False))
