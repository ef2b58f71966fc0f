"""Speculative decoding: draft tokens are cheap, and the model verifies several in one step (`decoding.py`).

A token is drawn from the model's logits by the row's own sampler, with the seed of its place in the answer, as
it is without a draft. A draft token is accepted if it is that token. So an answer has the same tokens as
without speculation, whatever was drafted, and its distribution is unchanged. Drafts are drawn with the same
seeds: where model and draft model agree on the probabilities, they agree on the token.

Source: Leviathan et al., "Fast Inference from Transformers via Speculative Decoding" (arXiv 2211.17192). Its
rule of acceptance is replaced by common random numbers, the idea of Daliri et al., "Coupling without
Communication and Drafter-Invariant Speculative Decoding" (arXiv 2408.07978); the draws are MLX's in place of
Gumbel noise, so that a seed draws what it draws in mlx-lm.
"""
