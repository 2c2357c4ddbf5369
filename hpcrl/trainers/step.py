"""A training step, the same for every trainer, from trajectories to metrics: the nodes of the pipeline, in their order.

    train_step         the step of rank 0: distribute_step, learn_rows, metrics
    learn_rows         the part of every rank; ranks other than 0 do nothing else (`follow_orders` in leader.py)

A node is a function that is called with the results of other nodes. These are all of hpcrl's, in the order in which
they run; a recipe has those that its settings need, and may add its own (`hpcrl plan --dag` shows them). The user's
may come between those of the first two parts, which `PipelineExecutor.run` of `hpcrl/learn/pipeline.py` therefore calls
in the order of the graph. `learn_rows` calls those of the last part by their names. The functions are in
`hpcrl/learn/distribute.py` and `hpcrl/trainers/nodes.py`:

    distribute_step: rank 0 alone
        advantage, rewards     distribute.py assign_credits     what every turn, or its tokens, is worth
        deal                   distribute.py distribute_rows    which rank trains which rows in which minibatch
    learn_rows: every rank, once in a step
        rows                   nodes.py read_rows               its rows, from the spool or from memory
        batches                nodes.py make_batches            the rows as tensors, in micro-batches
        reference, proximal    nodes.py compute_logprobs        of other models, and of the policy before it changes
        costs                  nodes.py subtract_costs          the KL as a part of the rewards
        values                 nodes.py estimate_values         the critic's, for "gae"
    learn_rows: every rank, once for every minibatch
        loss                   nodes.py compute_gradient        with the loss function of `hpcrl/learn/loss.py`
        update                 nodes.py update_policy           a step of the optimizer
        update-critic          nodes.py update_critic
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from hpcrl.config.recipe import TrainConfig
from hpcrl.learn.batch import TrainingRow
from hpcrl.learn.distribute import StepShares, distribute_step, load_share_rows
from hpcrl.learn.loss import LossSums
from hpcrl.learn.pipeline import PipelineExecutor
from hpcrl.spool.record import Trajectory
from hpcrl.system.processes import return_false
from hpcrl.trainers.base import RankTrainer, StepMetrics, check_trainable
from hpcrl.trainers.memory_error import StepMemoryError, watch_memory
from hpcrl.trainers.nodes import (
    RANK_NODES,
    StepWork,
    compute_gradient,
    compute_learning_rate,
    update_critic,
    update_policy,
)
from hpcrl.trainers.step_metrics import LearnResult, Stopwatch, build_step_metrics


def train_step(
    trainer: RankTrainer,
    trajectories: Sequence[Trajectory],
    *,
    train: TrainConfig,
    seed: int,
    step: int,
    version: int,
    read_share: Callable[[StepShares], list[list[TrainingRow]]] | None = None,
    segment_of: Callable[[Trajectory], str] = lambda _: "",
    must_abandon: Callable[[], bool] = return_false,
) -> StepMetrics:
    """Make one training step; `read_share` returns this rank's rows, without it those of `trajectories`."""
    stopwatch = Stopwatch()
    needs_teacher = trainer.has_scored_reference and train.kl != "none"  # a warm-up's steps have no KL
    check_trainable(trajectories, vocabulary_size=trainer.vocabulary_size, has_scored_reference=needs_teacher)
    step_shares = distribute_step(
        trajectories,
        train=train,
        num_ranks=trainer.num_shares,
        seed=seed,
        step=step,
        max_length=trainer.max_length,
        segment_of=segment_of,
    )
    stopwatch.record_lap("deal")
    learn_result = learn_rows(
        trainer,
        train=train,
        step=step,
        version=version,
        read_share=partial(read_share or _make_row_reader(trajectories, share=trainer.share, train=train), step_shares),
        skipped=step_shares.skipped,
        stopwatch=stopwatch,
        must_abandon=must_abandon,
    )
    return build_step_metrics(
        trajectories,
        step_shares=step_shares,
        learn_result=learn_result,
        step=step,
        version=version,
        stopwatch=stopwatch,
    )


def learn_rows(
    trainer: RankTrainer,
    *,
    train: TrainConfig,
    step: int,
    version: int,
    read_share: Callable[[], list[list[TrainingRow]]],
    skipped: str | None,
    stopwatch: Stopwatch,
    must_abandon: Callable[[], bool] = return_false,
) -> LearnResult:
    """Run the nodes of every rank on its share of a step, whose rows `read_share` returns.

    A rank that skips a step reads its rows all the same, which starts to prefetch the next. One that runs out of memory
    raises StepMemoryError; the others wait for it then, so all have to be started again. Any rank's `must_abandon` ends
    the step before its first update; only rank 0 is given one.
    """
    trainer.use_settings(train)
    executor = PipelineExecutor(train, RANK_NODES)
    rate = compute_learning_rate(step, train=train, peak=train.learning_rate)
    result = LearnResult(LossSums.zero(trainer.world.device), learning_rate=rate, is_replayed=train.router_replay)
    work = StepWork(
        train=train,
        executor=executor,
        trainer=trainer,
        step=step,
        version=version,
        read_share=read_share,
        must_abandon=must_abandon,
        result=result,
        policy_loss=executor.make_loss(),
    )
    results: dict[str, Any] = {"deal": None}  # its result is with `read_share`
    try:
        with watch_memory():
            executor.run("rows", work=work, results=results)
            stopwatch.record_lap("rows")
            work.skipped = skipped
            executor.run("prepare", work=work, results=results)
            for number in list(range(len(work.totals))) * train.epochs:
                if work.skipped is not None:
                    break
                sums = compute_gradient(work, number, *executor.list_inputs("loss", results))
                update_policy(work, number, sums)
                if "update-critic" in executor.nodes and work.skipped is None:
                    update_critic(work, number)
    except StepMemoryError as error:
        error.step, error.fitting_tokens = step, trainer.fitting_tokens
        raise
    trainer.fitting_tokens = max(trainer.fitting_tokens, result.largest_batch)
    result.skipped = work.skipped
    stopwatch.record_lap("learn")
    return result


def _make_row_reader(
    trajectories: Sequence[Trajectory], *, share: int, train: TrainConfig
) -> Callable[[StepShares], list[list[TrainingRow]]]:
    """Make a `read_share` for a rank that has all trajectories of the step itself."""
    by_id = {trajectory.id: trajectory for trajectory in trajectories}
    return lambda dealt: load_share_rows(
        dealt.shares[share],
        fetch=lambda items: [by_id[item.id] for item in items],
        train=train,
    )
