"""A training loop of one's own, with peft's adapters and the fused forward.

    python examples/accelerate_peft.py

The transformer is a tiny Wan 2.1 with random weights; the lines of SAGE-Fast are the
import and the call of `accelerate`.
"""

import torch
from diffusers import WanTransformer3DModel
from peft import LoraConfig

from sage_fast import accelerate

model = WanTransformer3DModel(
    num_attention_heads=2, attention_head_dim=12, num_layers=2, ffn_dim=48, text_dim=32
)
model.requires_grad_(False)
model.add_adapter(LoraConfig(r=4, target_modules=["to_q", "to_k", "to_v", "to_out.0"]))
acceleration = accelerate(model)  # undo() gives diffusers' forward back

adapters = [p for p in model.parameters() if p.requires_grad]
optimizer = torch.optim.AdamW(adapters, lr=1e-3)
video = torch.randn(1, 16, 2, 8, 8)
text = torch.randn(1, 512, 32)
for step in range(3):
    noise = torch.randn_like(video)
    sigma = torch.rand(1)
    noised = (1 - sigma) * video + sigma * noise
    velocity = model(noised, 1000 * sigma, text, return_dict=False)[0]
    loss = (velocity - (noise - video)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.4f}")
