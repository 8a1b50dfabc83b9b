"""One rank of a rung, alone: built, stepped and looked at under torch's fake process group.

Every world lives in a process of its own, forked from a warm server: DTensor's caches
keep the groups of an earlier one.
"""

from __future__ import annotations

import gc
import multiprocessing
import traceback
import warnings
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.pipelining._utils import InferenceMode
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from elastic_trainer.data import Samples
from elastic_trainer.parallel.apply import initialise, slice_of
from elastic_trainer.plan.config import TrainConfig
from elastic_trainer.state.state import clean_name
from elastic_trainer.train.engine import Engine
from elastic_trainer.train.feed import Feed
from elastic_trainer.train.optimizer import build_optimizer, clip_gradients, gradient_square_sum

_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(["elastic_trainer.train.main", "fake_world"])
DEADLINE_S = 20.0
CPU = torch.device("cpu")


def apart(function, *args, deadline_s=DEADLINE_S):
    """Return `function(*args)`, called in a process of its own; raise what it raises."""
    ours, theirs = _SERVER.Pipe(duplex=False)
    child = _SERVER.Process(target=_answer, args=(theirs, function, args))
    child.start()
    theirs.close()
    try:
        assert ours.poll(deadline_s), f"{function.__name__}{args[1:]} does not end"
        answer, failure = ours.recv()
    finally:
        child.kill()
        child.join()
        ours.close()
    assert failure is None, failure
    return answer


def _answer(pipe, function, args):
    gc.freeze()  # the server's: looking through it would copy its pages
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "Set timeout is now only supported", UserWarning)
    warnings.filterwarnings("ignore", ".* is deprecated", FutureWarning)
    warnings.filterwarnings("ignore", r"FSDP2-wrapped module .* returned a view", UserWarning)
    try:
        pipe.send((function(*args), None))
    except BaseException:  # noqa: BLE001  the parent says what it was
        pipe.send((None, traceback.format_exc()))


@contextmanager
def _engine(config, rung, rank):
    world_size = rung.layout.world_size
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield Engine(config, rung, rank, CPU)
    finally:
        dist.destroy_process_group()


def build(job_json, ranks):
    """Build a rank of each rung, with its pipeline schedule; `ranks` are (nodes, rank)."""
    config = TrainConfig.from_json(job_json)
    for num_nodes, rank in ranks:
        with _engine(config, config.ladder.rung_for(num_nodes), rank) as engine:
            engine.allocate()
            assert sum(param.numel() for param in engine.model.parameters()) > 0


def step(job_json, num_nodes, rank):
    """Run one optimizer step of `rank`; what peers would send is anything of the right shape."""
    config = TrainConfig.from_json(job_json)
    rung = config.ladder.rung_for(num_nodes)
    schedules._PipelineSchedule._warmup_p2p = _agree_on_shapes
    with _engine(config, rung, rank) as engine:
        engine.allocate()
        initialise(engine.model, config.train.seed)
        for stage in engine.stages:
            stage.register_forward_hook(_stage_returns_what_the_next_expects(engine, stage))
        feed = Feed(
            _Corpus(config.train.seq_len),
            config.train,
            rung,
            coordinate=engine.coordinate,
            ledger=None,
            device=CPU,
        )
        optimizer = build_optimizer(engine.model, config.train.optimizer)
        tokens = config.train.global_batch * config.train.seq_len
        loss = engine.forward_backward(feed.micro_batches(1), tokens)
        for name, param in engine.model.named_parameters():
            assert param.grad is not None, f"{name} has no gradient"
            assert _local(param.grad).shape == _local(param).shape, name
        norm = gradient_square_sum(engine.model).sqrt()
        clip_gradients(engine.model, float(norm), config.train.optimizer.clip_norm)
        optimizer.step()
        return float(loss)


def _local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _agree_on_shapes(_schedule, stages, has_backward, _p2p_done):
    """Stand in for the stages' vote on whether all shapes are known, which asks the peers."""
    for stage in stages:
        assert not InferenceMode.needs_dynamic(stage._user_meta, has_backward)
        stage._inference_mode = InferenceMode.STATIC


def _stage_returns_what_the_next_expects(engine, stage):
    parts = getattr(engine._pipeline._schedule, "_stages", None)
    parts = parts or [engine._pipeline._schedule._stage]
    (told,) = next(part for part in parts if part.submod is stage)._user_meta.outputs

    def compare(_module, _args, output):
        assert (output.shape, output.dtype) == (told.shape, told.dtype)

    return compare


class _Corpus:
    def __init__(self, seq_len):
        self._seq_len = seq_len

    def samples(self, used):
        tokens = torch.arange(len(used) * (self._seq_len + 1)).view(len(used), -1) % 256
        return Samples(tokens[:, :-1], tokens[:, 1:], None)


def accumulated_bytes(job_json, num_nodes, rank):
    """Return the bytes of gradients a pipeline rank holds just before it reduces them."""
    seen = []
    reduce = PipelineStage.perform_reduce_grad

    def count(stage, *args):
        wrapped = [m for m in stage.submod.modules() if isinstance(m, FSDPModule)]
        groups = {m._get_fsdp_state()._fsdp_param_group for m in wrapped}  # some of two modules
        for group in groups - {None}:
            for param in group.fsdp_params:
                grad = param.unsharded_accumulated_grad
                grad = param._unsharded_param.grad if grad is None else grad
                seen.append(_local(grad).nbytes)
        return reduce(stage, *args)

    PipelineStage.perform_reduce_grad = count
    step(job_json, num_nodes, rank)
    return sum(seen)


def shards(job_json, num_nodes, rank):
    """Return name -> (shape of the whole, slices that `rank` holds) of each parameter."""
    config = TrainConfig.from_json(job_json)
    held = {}
    with _engine(config, config.ladder.rung_for(num_nodes), rank) as engine:
        for wrapped_name, param in engine.model.named_parameters():
            whole, part = tuple(param.shape), slice_of(param)
            lengths = tuple(
                len(range(*cut.indices(size))) for cut, size in zip(part, whole, strict=True)
            )
            assert lengths == tuple(_local(param).shape), f"{wrapped_name}: {part}"
            held[clean_name(wrapped_name)] = (whole, part)
    return held
