"""Measure TransferQueue 0.1.11 with the shape of its perftest, in a separate process: prints put and get in MB/s.

128 samples x 4 fields x 1,024 float32 through `kv_batch_put` and `kv_batch_get` of its SimpleStorage. Nothing is on
a disk afterwards: the samples are lost with a killed storage actor.
"""

import logging
import os
import time

NUM_SAMPLES, NUM_FIELDS, LENGTH = 128, 4, 1024
NUM_BYTES = NUM_SAMPLES * NUM_FIELDS * LENGTH * 4
_ROUNDS = 12


def main() -> None:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["TQ_LOGGING_LEVEL"] = "ERROR"
    import ray
    import torch
    import transfer_queue as tq
    from omegaconf import OmegaConf
    from tensordict import TensorDict

    ray.init(num_cpus=4, include_dashboard=False, logging_level=logging.ERROR, log_to_driver=False)
    storage = {"total_storage_size": NUM_SAMPLES * (_ROUNDS + 1), "num_data_storage_units": 1}
    tq.init(
        OmegaConf.create(
            {
                "controller": {"sampler": "SequentialSampler", "polling_mode": False},
                "backend": {"storage_backend": "SimpleStorage", "SimpleStorage": storage},
            }
        )
    )
    fields = TensorDict(
        {f"field_{index}": torch.randn(NUM_SAMPLES, LENGTH) for index in range(NUM_FIELDS)}, batch_size=(NUM_SAMPLES,)
    )
    put, get = [], []
    for number in range(_ROUNDS):
        keys = [f"{number}/{index}" for index in range(NUM_SAMPLES)]
        started = time.perf_counter()
        tq.kv_batch_put(keys=keys, partition_id="train", fields=fields)
        between = time.perf_counter()
        tq.kv_batch_get(keys=keys, partition_id="train")
        put.append(between - started)
        get.append(time.perf_counter() - between)
    tq.close()
    ray.shutdown()
    print("\n", *(NUM_BYTES / 1e6 / sorted(times)[_ROUNDS // 2] for times in (put, get)), flush=True)


if __name__ == "__main__":
    main()
