"""Two trainings in one script, the second from what the first left: several_trainings.py KIND.

With an agent or without, each rank prints what came of each as `RESULT {...}`.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

SAMPLES, WIDTH = 40, 16


def tell(training, model, **more):
    whole = [getattr(p, "full_tensor", lambda p=p: p)().detach() for p in model.parameters()]
    total = sum(float(p.double().norm()) for p in whole)
    said = {"training": training, "rank": int(os.environ["RANK"]), "norm": total, **more}
    sys.stdout.write(f"RESULT {json.dumps(said)}\n")
    sys.stdout.flush()


def tensors(seed):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(SAMPLES, WIDTH, generator=g)


def own(names):
    """A loop whose trainings end early, when the sum of losses says so."""
    from elastic_trainer import api

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Linear(WIDTH, 1)
    for training, name in enumerate(names or [None, None], 1):
        differs = {"of-rank": "RANK", "of-epoch": "TORCHELASTIC_RESTART_COUNT"}.get(name)
        run = api.start(name=f"{name}-{os.environ[differs]}" if differs else name)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01 / training)
        data, spent = tensors(training), torch.zeros(())
        step = begun = run.restore(model, optimizer, {"spent": spent})
        while step < 1000 and not run.finished:
            rows = data[(2 * step + run.rank) % SAMPLES :: SAMPLES // 4]
            loss = model(rows).square().mean()
            loss.backward()
            for param in model.parameters():
                dist.all_reduce(param.grad)
            optimizer.step()
            optimizer.zero_grad()
            spent += 1.0
            step += 1
            time.sleep(0.05)
            if run.completed(step, loss=float(loss)):
                run.leave()
            if spent >= 20:
                break
        run.finish(step)
        tell(training, model, steps=step, begun=begun)
    dist.barrier()


def pad(batch):
    longest = max(len(row["input_ids"]) for row in batch)
    ids = torch.zeros(len(batch), longest, dtype=torch.int64)
    labels = torch.full_like(ids, -100)
    for i, row in enumerate(batch):
        ids[i, : len(row["input_ids"])] = labels[i, : len(row["input_ids"])] = row["input_ids"]
    return {"input_ids": ids, "labels": labels, "attention_mask": (labels >= 0).long()}


VARIANTS = {
    "grouped": {"train_sampling_strategy": "group_by_length"},
    "rebalanced": {"train_sampling_strategy": "batch_rebalance", "max_steps": 20},
    "one-generator": {"accelerator_config": {"use_seedable_sampler": False}},
    "adafactor": {"optim": "adafactor"},
    "rarely-logged": {"logging_steps": 5},
    "split": {"per_device_train_batch_size": 4, "accelerator_config": {"split_batches": True}},
}
"""Of the Trainer: what the order of samples, the batch or the state may depend on."""


def hf(names):
    """Lengths that differ, grouped: an order of samples that depends on the batch."""
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    from elastic_trainer.integrations.transformers import HoldfastCallback

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        vocab_size=64,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    options = {"per_device_train_batch_size": 2, "logging_steps": 1}
    options |= VARIANTS[names[0] if names else "grouped"]
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(), num_train_epochs=2, save_strategy="no", learning_rate=1e-2,
        use_cpu=True, disable_tqdm=True, report_to=[], **options,
    )  # fmt: skip
    for training in (1, 2):
        g = torch.Generator().manual_seed(training)
        sizes = torch.randint(4, 30, (SAMPLES,), generator=g).tolist()
        rows = [{"input_ids": torch.randint(1, 64, (size,), generator=g)} for size in sizes]
        trainer = Trainer(
            model=model, args=arguments, train_dataset=rows, data_collator=pad,
            callbacks=[HoldfastCallback()],
        )  # fmt: skip
        result = trainer.train()
        tell(training, model, steps=result.global_step, loss=result.training_loss)


def lightning(_names):
    from lightning.pytorch import LightningModule, Trainer
    from torch.utils.data import DataLoader

    from elastic_trainer.integrations.lightning import LightningCallback

    class Module(LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(WIDTH, 1)

        def training_step(self, batch):
            time.sleep(0.03)
            return self.layer(batch).square().mean()

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    torch.manual_seed(0)
    module, folder = Module(), tempfile.mkdtemp()
    for training in (1, 2):
        trainer = Trainer(
            accelerator="cpu", strategy="ddp", max_epochs=2, default_root_dir=folder,
            num_nodes=int(os.environ["GROUP_WORLD_SIZE"]), logger=False,
            devices=int(os.environ["LOCAL_WORLD_SIZE"]),
            enable_checkpointing=False, enable_progress_bar=False, callbacks=[LightningCallback()],
        )  # fmt: skip
        trainer.fit(module, DataLoader(tensors(training), batch_size=2, shuffle=True))
        tell(training, module, steps=trainer.global_step)


def megatron(_names):
    """A GPT of Megatron-core, of which each training has other samples."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
    import megatron_core as example

    dist.init_process_group("gloo")
    example.parallel_state.initialize_model_parallel()
    model = example.build(tp=1).eval()  # dropout would draw as without an agent it does not
    for training in (1, 2):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01 / training)
        for step in (steps := example.Steps(20, model, optimizer)):
            optimizer.zero_grad()
            steps.loss = example.loss_of(model, step + 100 * training)
            optimizer.step()
            time.sleep(0.05)
        tell(training, model, steps=steps.done)


def torchtitan(_names):
    """Models of its own for each Trainer, of which the second has other samples."""
    import torchtitan_loop as loop

    dist.init_process_group("gloo")
    for training in (1, 2):
        trainer = loop.Small(20)
        trainer.dataloader.dataset.at += 100 * training
        loop.keep(trainer)
        trainer.train()
        tell(training, trainer.model_parts[0], steps=trainer.step)


def crash_once(path):
    """Die on one rank after the last step, as a save of the script's own may."""
    time.sleep(0.5)
    if os.environ["RANK"] == "1" and not Path(path).exists():
        Path(path).touch()
        os._exit(3)


if __name__ == "__main__":
    kind, *names = sys.argv[1:]
    if kind.startswith("crash="):
        crash, (kind, *names) = kind.removeprefix("crash="), names
    else:
        crash = None
    kinds = {"own": own, "hf": hf, "lightning": lightning}
    kinds |= {"megatron": megatron, "torchtitan": torchtitan}
    kinds[kind](names)
    if crash is not None:
        crash_once(crash)
    if dist.is_initialized():  # else plain torchrun may abort as Python ends (docs/scripts.md)
        dist.monitored_barrier()
