"""Speculative decoding: tokens are guessed cheaply, and the model checks several of them in one step.

| file | what it holds |
| --- | --- |
| `drafting.py` | what an engine drafts with, and for which rows; how often it was right |
| `draft.py` | the tokens that one row is fed in one step |
| `draft_model.py`, `prompt_lookup.py` | the two ways to guess |
| `draft_length.py` | how many tokens to guess: what steps cost, how many guesses are right |
| `speculative_decoding.py`, `verification.py` | a step with guesses; which of them stand |

The token at a place is drawn from the model's logits there, by the row's own sampler with the seed of that
place, as it is without a draft. A guess stands if it is that token. So an answer has the tokens that it has
without speculation, whatever was guessed, and its distribution is untouched. Drafts are drawn with the same
seeds: where model and draft model agree on the probabilities, they agree on the token.

Source: Leviathan et al., "Fast Inference from Transformers via Speculative Decoding" (arXiv 2211.17192). Its
rule of acceptance is replaced by common random numbers, the idea of Daliri et al., "Coupling without
Communication and Drafter-Invariant Speculative Decoding" (arXiv 2408.07978); the draws are MLX's in place of
Gumbel noise, so that a seed draws what it draws in mlx-lm.
"""
