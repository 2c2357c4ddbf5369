"""Tiny models and batches that several test files train on, and the functions that their ranks run."""

import os
import signal
from functools import partial
from pathlib import Path
from unittest.mock import patch

import msgspec
import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from hpcrl.campaign_dir.event_log import EventLog
from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.config.recipe import TrainConfig
from hpcrl.hardware.architecture import read_architecture
from hpcrl.learn.batch import MicroBatch, empty_micro_batch
from hpcrl.learn.consumed import ConsumedTrajectories
from hpcrl.models.model_config import read_model_config
from hpcrl.rollout.agents.episode_record import build_record
from hpcrl.spool.routed_experts import NO_EXPERT_BYTE
from hpcrl.testing import ranks
from hpcrl.testing.learning import load_causal, load_checkpoint, save_checkpoint
from hpcrl.trainers.base import StepAbandonedError
from hpcrl.trainers.checkpoint import find_newest
from hpcrl.trainers.leader import RankLeader, follow_orders
from hpcrl.trainers.publishing import make_published_layout, open_shard_store
from hpcrl.trainers.spread_model import SpreadModel
from hpcrl.trainers.torch import TorchTrainer
from hpcrl.weights.stores.file_store import FileStore
from hpcrl.weights.stores.publisher import WeightPublisher
from hpcrl.weights.versions import Transport, WeightVersion, read_transport
from hpcrl.weights.window.file import WindowKey
from tests.support.conversations import FACTS, answer
from tests.support.trajectories import make_random_trajectory

ranks.preload_module(__name__)

VOCABULARY = 32
CONTEXT = 64
FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}


def make_model(directory, *, family="qwen2", tied=False, seed=0):
    """Save a model of four layers, four heads and two KV heads."""
    kind, model = FAMILIES[family]
    torch.manual_seed(seed)
    config = kind(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=4,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=tied,
    )
    made = model(config)
    with torch.no_grad():  # norms and biases other than one and zero show which of them get lost
        for parameter in made.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    made.save_pretrained(directory)
    return directory


def forked_turns(seed):
    """Make the turns of an episode: a question, a sub-agent, two ways on from the question, a compacted history."""
    rng = np.random.default_rng(seed)

    def turn(number, parent, num_prompt, num_answer):
        prompt, output = (
            rng.integers(0, VOCABULARY, int(rng.integers(1, most))).tolist() for most in (num_prompt, num_answer)
        )
        logprobs = (-np.log(VOCABULARY) + 0.1 * rng.normal(size=len(output))).tolist()
        return answer(number, parent, prompt, output, logprobs=logprobs)

    first = turn(0, None, 14, 9)
    one = turn(2, first, 6, 9)
    return [first, turn(1, None, 20, 9), one, turn(3, first, 4, 5), turn(4, one, 4, 9), turn(5, None, 30, 3)]


def forked(group, index, *, reward, seed=0):
    """Make an episode of four conversations, two of which start with the same turn."""
    facts = msgspec.structs.replace(FACTS, id=f"{group}/{index}", group=group, domain="math", start_version=1)
    record = build_record(forked_turns([seed, index]), facts, reward=reward)
    return msgspec.structs.replace(record, reward=reward)


def forked_batch(step=0, *, num_groups=3, size=4):
    """Make groups of episodes of several conversations."""
    rewards = np.random.default_rng(step).integers(0, 3, (num_groups, size))
    return [
        forked(f"math/{step * num_groups + number}", index, reward=float(reward), seed=step * num_groups + number)
        for (number, index), reward in np.ndenumerate(rewards)
    ]


def batch(step=0, *, num_groups=3, size=4):
    """Make groups of episodes of different lengths and rewards."""
    rng = np.random.default_rng(step)
    return [
        make_random_trajectory(
            f"math/{step * num_groups + number}/{index}",
            reward=float(rng.integers(0, 3)),
            seed=step * num_groups + number,
            length=int(rng.integers(8, 60)),
            vocabulary=VOCABULARY,
        )
        for number in range(num_groups)
        for index in range(size)
    ]


def replayed_batch(model_dir, step=0, **sizes):
    """Make the same episodes with random experts for a model."""
    shape = read_architecture(read_model_config(model_dir / "config.json").fields)
    rng = np.random.default_rng(step)
    found = []
    for one in batch(step, **sizes):
        scores = rng.random((len(one), shape.num_expert_layers, shape.num_experts))
        experts = scores.argsort(-1)[..., : shape.experts_per_token].astype(np.uint8)
        found.append(msgspec.structs.replace(one, experts=experts))
    return found


def partly_replayed_batch(model_dir, step=0, **sizes):
    """Make the same episodes without the experts of every sixth one, and of the first tokens of the next."""
    found = replayed_batch(model_dir, step, **sizes)
    for number, one in enumerate(found):
        experts = None if number % 6 == 2 else np.array(one.experts)
        if number % 6 == 3:
            experts[: len(one) // 2] = NO_EXPERT_BYTE
        found[number] = msgspec.structs.replace(one, experts=experts)
    return found


def settings(**changed):
    plain = {"num_steps": 9, "groups_per_step": 3, "learning_rate": 1e-3, "tokens_per_micro_batch": 128}
    return msgspec.convert({**plain, **changed}, TrainConfig)


def trained(trainer, *, first=1, last=5, make=batch):
    """Train some steps; return their metrics, and two numbers of every weight at the end."""
    steps = [trainer.train_step(make(step), step=step, version=step) for step in range(first, last + 1)]
    weights = {
        name: [float(tensor.double().sum()), float(tensor.double().square().sum())]
        for name, tensor in sorted(trainer.tensors().items())
    }
    return {
        "skipped": [metrics.skipped for metrics in steps],
        "loss": [metrics.loss for metrics in steps],
        "grad_norm": [metrics.grad_norm for metrics in steps],
        "entropy": [metrics.entropy for metrics in steps],
        "kl_fresh": [metrics.kl_fresh for metrics in steps],
        "value_loss": [metrics.value_loss for metrics in steps],
        "num_tokens": [metrics.num_tokens for metrics in steps],
        "replayed_fraction": [metrics.replayed_fraction for metrics in steps],
        "weights": weights,
    }


def train_torch(world, model_dir, changed, load_from=None, save_to=None, first=1, last=5):
    """Train some steps on one rank of several, from a checkpoint or the start; perhaps save another checkpoint."""
    torch.set_num_threads(1)
    trainer = TorchTrainer(Path(model_dir), settings(**changed), seed=3, world=world)
    return _train(trainer, load_from, save_to, first, last, make=_choose_batch(model_dir, changed))


def _choose_batch(model_dir, changed):
    """Return the function that makes the episodes of a step, with some experts where these are to be replayed."""
    return partial(partly_replayed_batch, Path(model_dir)) if changed.get("router_replay") else batch


def train_variants(world, model_dir, variants, sharding):
    """Make several short runs one after the other, in processes that are started once."""
    return [train_torch(world, model_dir, {**changed, "sharding": sharding}) for changed in variants]


def train_with_sleeps(world, model_dir, variants, sharding):
    """Make the same runs with a sleep after each step."""
    torch.set_num_threads(1)
    found = []
    for changed in variants:
        trainer = TorchTrainer(Path(model_dir), settings(**changed, sharding=sharding), seed=3, world=world)
        runs = []
        for step in range(1, 6):
            runs.append(trained(trainer, first=step, last=step))
            trainer.sleep()
            world.any(False)
            trainer.snapshot()
            trainer.wake()
        joined = {name: [value for run in runs for value in run[name]] for name in runs[0] if name != "weights"}
        found.append(joined | {"weights": runs[-1]["weights"]})
    return found


def train_megatron(world, model_dir, changed, load_from=None, save_to=None, first=1, last=5):
    """Do the same with the Megatron trainer."""
    from hpcrl.trainers.megatron.trainer import MegatronTrainer

    torch.set_num_threads(1)
    trainer = MegatronTrainer(Path(model_dir), settings(**changed), seed=3, world=world)
    return _train(trainer, load_from, save_to, first, last, make=_choose_batch(model_dir, changed))


def spread_logprobs(world, model_dir, degree, seed=0):
    """Compute log-probs under a model on `degree` ranks; two ranks have the same batches, as a Megatron replica."""
    torch.set_num_threads(1)
    share = world.rank // 2
    spread = SpreadModel(Path(model_dir), settings(), data_parallel=degree, share=share, world=world, temperature=0.7)
    rng = np.random.default_rng([seed, share])
    minibatches = [[_random_batch(rng) for _ in range(num)] for num in (3, share, 2)]
    minibatches[2].append(empty_micro_batch())
    found = spread.compute_logprobs(minibatches)
    model = load_causal(Path(model_dir)).eval()
    errors = [
        float((column_N - _compute_alone(model, micro)).abs().sum())
        for minibatch, columns in zip(minibatches, found, strict=True)
        for micro, column_N in zip(minibatch, columns, strict=True)
    ]
    return {"errors": errors, "has_model": spread._model is not None}


def _random_batch(rng):
    rows, length = rng.integers(1, 4), rng.integers(3, 12)
    mask_BT = torch.from_numpy(rng.random((rows, length)) < 0.5)
    num = int(mask_BT.sum())
    return MicroBatch(
        inputs_BT=torch.from_numpy(rng.integers(0, VOCABULARY, (rows, length))),
        mask_BT=mask_BT,
        targets_N=torch.from_numpy(rng.integers(0, VOCABULARY, num)),
        behaviour_N=torch.zeros(num),
        advantages_N=torch.zeros(num),
        rows_N=mask_BT.nonzero()[:, 0],
    )


def _compute_alone(model, micro):
    with torch.no_grad():
        logprobs_BTV = torch.log_softmax(model(micro.inputs_BT).logits / 0.7, -1)
    return logprobs_BTV[micro.mask_BT].gather(-1, micro.targets_N[:, None])[:, 0]


def train_counted(world, model_dir, trainer, changed):
    """Train two steps; return their results, the number of all-to-alls, and whether this rank has the spread model."""
    torch.set_num_threads(1)
    mine = _kind(trainer)(Path(model_dir), settings(**changed), seed=3, world=world)
    exchanged = []
    with patch.object(type(world), "exchange", _count_calls(type(world).exchange, exchanged)):
        found = trained(mine, last=2)
    return found | {
        "num_exchanges": len(exchanged),
        "has_model": [spread._model is not None for spread in mine.spread_models.values()],
    }


def _count_calls(function, counted):
    def call(*given):
        counted.append(1)
        return function(*given)

    return call


def train_forked(world, model_dir, trainer, variants):
    """Make two steps on episodes of several conversations, with each of the settings."""
    torch.set_num_threads(1)
    made = (_kind(trainer)(Path(model_dir), settings(**changed), seed=3, world=world) for changed in variants)
    return [trained(one, last=2, make=forked_batch) for one in made]


def _train(trainer, load_from, save_to, first, last, make=batch):
    if load_from is not None:
        trainer.load(Path(load_from))
    result = trained(trainer, first=first, last=last, make=make)
    if save_to is not None:
        Path(save_to).mkdir(exist_ok=True)
        trainer.snapshot().write(Path(save_to))
    return result


def publish_parts(world, model_dir, root, trainer, changed, window_dir, nodes, transport, dtype):
    """Publish two versions from all ranks; return what rank 0 finds stored, and the number of gathers."""
    torch.set_num_threads(1)
    os.environ["SLURMD_NODENAME"] = nodes[world.rank]
    mine, counted = _counting(_kind(trainer)(Path(model_dir), settings(**changed), world=world))
    if changed.get("lora_rank"):
        with torch.no_grad():  # fresh adapters add nothing
            for adapter in mine._policy._adapters.values():
                adapter.up_OR.add_(0.1)
    campaign = CampaignDir(Path(root))
    campaign.weights.mkdir(exist_ok=True)
    key = WindowKey(campaign=campaign.root, node=nodes[world.rank], directory=Path(window_dir))
    layout = make_published_layout(mine, dtype)
    if world.rank:
        store = open_shard_store(mine, key, job=campaign.job(0), layout=layout)
        follow_orders(mine, train=settings(), spool=campaign.spool("scored"), store=store)
        return len(counted)
    leader = make_leader(mine, settings(), spool=campaign.spool("scored"), checkpoints=campaign.checkpoints)
    events = EventLog(campaign.events / "t.jsonl", job=0, role="train", worker="train-0", node="n", partition="p")
    publisher = WeightPublisher(
        FileStore(campaign.weights),
        leader.window(key, job=campaign.job(0), layout=layout),
        events=events,
        keep_versions=4,
        layout=layout,
    )
    publisher.set_transport(Transport(name=transport, reason="a test"))
    for version in (1, 2):
        publisher.publish(
            leader.weight_shards, WeightVersion(version=version, step=version), gather_tensors=leader.tensors
        )
    publisher.persist()
    windows = {path.name.rpartition("-")[2]: path.stat().st_size for path in Path(window_dir).glob("hpcrl-*")}
    leader.keep_ranks_alive()
    num_gathered = len(counted)
    expected = leader.tensors()
    leader.close()
    publisher.close()
    published = FileStore(campaign.weights).load(2)
    same = expected.keys() == published.keys() and all(
        torch.equal(published[name], tensor.to(getattr(torch, dtype))) for name, tensor in expected.items()
    )
    return {
        "same": same,
        "trained": sorted({str(tensor.dtype) for tensor in expected.values()}),
        "rounded": any(not torch.equal(published[name].float(), tensor) for name, tensor in expected.items()),
        "num_gathered": num_gathered,
        "transport": read_transport(campaign.weights).name,
        "windows": windows,
        "files": sorted(path.name for path in campaign.weights.iterdir()),
        "nbytes": sum(tensor.nbytes for tensor in published.values()),
        "trained_nbytes": sum(tensor.nbytes for tensor in expected.values()),
    }


def _kind(trainer):
    if trainer == "megatron":
        from hpcrl.trainers.megatron.trainer import MegatronTrainer

        return MegatronTrainer
    return TorchTrainer


def _counting(mine):
    """Return the trainer, and a list with an entry for each time that its weights are gathered."""
    gather, counted = mine.tensors, []

    def tensors():
        counted.append(1)
        return gather()

    mine.tensors = tensors
    return mine, counted


def list_shapes(world, model_dir, changed, longest):
    """Return the shapes of the micro-batches of a step of Megatron with many short rows and one long one."""
    from hpcrl.trainers.megatron.trainer import MegatronTrainer

    torch.set_num_threads(1)
    trainer = MegatronTrainer(Path(model_dir), settings(**changed), seed=3, world=world)
    shapes, place = [], trainer.place_batches

    def keep(minibatches):
        placed = place(minibatches)
        shapes.extend(tuple(micro.inputs_BT.shape) for part in placed for micro in part)
        return placed

    trainer.place_batches = keep
    lengths = [8] * 15 + [longest]
    given = [
        make_random_trajectory(
            f"math/0/{index}", reward=float(index % 2), seed=index, length=length, vocabulary=VOCABULARY
        )
        for index, length in enumerate(lengths)
    ]
    trainer.train_step(given, step=1, version=1)
    return shapes


def make_leader(mine, train, *, spool, checkpoints, upcoming=lambda _: ()):
    """Make the leader of steps on `batch`, whose segments are named by their step."""
    return RankLeader(
        mine,
        train=train,
        seed=3,
        spool=Path(spool),
        checkpoints=Path(checkpoints),
        segment_of=lambda episode: segment_of_step(int(episode.group.partition("/")[2]) // 3),
        upcoming=upcoming,
    )


def lead_steps(world, model_dir, spool, checkpoints, last, dies_at=None):
    """Lead steps over the spool with a checkpoint after each; perhaps be killed in the middle of one."""
    torch.set_num_threads(1)
    train = settings()
    mine = TorchTrainer(Path(model_dir), train, seed=3, world=world)
    if world.rank:
        follow_orders(mine, train=train, spool=Path(spool))
        return None
    leader = make_leader(
        mine,
        train,
        spool=spool,
        checkpoints=checkpoints,
        upcoming=lambda version: batch(version + 1) if version < last else [],
    )
    path = find_newest(Path(checkpoints), report=_refuse_damage)
    step, consumed = 0, ConsumedTrajectories()
    if path is not None:
        manifest, consumed = load_checkpoint(path, trainer=leader)
        step = manifest.step
    losses = {}
    while step < last:
        episodes = batch(step + 1)
        assert not any(episode.id in consumed for episode in episodes)
        if step + 1 == dies_at:  # its order is sent, and the next step's rows are being read
            mine.place_batches = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        losses[step + 1] = leader.train_step(episodes, step=step + 1, version=step).loss
        step += 1
        consumed.update(episode.id for episode in episodes)
        save_checkpoint(Path(checkpoints), step=step, version=step, trainer=leader, consumed=consumed)
    leader.close()
    return losses


def abandon_a_step(world, model_dir, spool, sharding):
    """Make a step, abandon the second between two micro-batches, and make it then."""
    torch.set_num_threads(1)
    train = settings(sharding=sharding, tokens_per_micro_batch=40)
    mine = TorchTrainer(Path(model_dir), train, seed=3, world=world)
    if world.rank:
        follow_orders(mine, train=train, spool=Path(spool))
        return None
    leader = make_leader(mine, train, spool=spool, checkpoints=spool, upcoming=lambda version: batch(version + 1))
    losses, answers = [leader.train_step(batch(1), step=1, version=0).loss], [True, False]
    before = leader.tensors()
    try:
        leader.train_step(batch(2), step=2, version=1, must_abandon=answers.pop)
    except StepAbandonedError as error:
        losses.append(str(error))
    after = leader.tensors()
    is_same = all(torch.equal(after[name], tensor) for name, tensor in before.items())
    losses.append(leader.train_step(batch(2), step=2, version=1).loss)
    leader.close()
    return [is_same, *losses]


def segment_of_step(step):
    """Return the segment that holds the trajectories of a step."""
    return f"000-env-0-{step:08d}-12-0123abcd.h5"


def _refuse_damage(path, why):
    raise AssertionError(f"{path}: {why}")
