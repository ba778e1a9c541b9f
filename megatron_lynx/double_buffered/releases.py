"""The source text that training without flushes relies on in megatron-core, by release, in addition to what hooks rely on.

Whose memory weights and gradients are in (`owners`), and when a batch's gradient is whole, follows from these functions. As in
`apply.releases`, a function that reads otherwise is refused, because only somebody who reads the new text can tell; and the first
release lists all functions, every later one those that read otherwise than in the release before.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron_lynx.apply.inventory import Held, inventory
from megatron_lynx.apply.releases import Release, installed_version, minor_of
from megatron_lynx.errors import Problem

CORE_0_16 = Release(  # recorded from 0.16.1
    version="0.16",
    fingerprints={
        "megatron.core.pipeline_parallel.schedules:forward_step": "24c526af44458ac2",
        "megatron.core.pipeline_parallel.schedules:backward_step": "6ac4aa596b1b6261",
        "megatron.core.pipeline_parallel.schedules:deallocate_output_tensor": "13903f30b90cefe7",
        "megatron.core.pipeline_parallel.schedules:get_tensor_shapes": "c3d870d49b0c789a",
        "megatron.core.pipeline_parallel.schedules:forward_backward_pipelining_without_interleaving": "ecf7d69308cda660",
        "megatron.core.pipeline_parallel.p2p_communication:P2PCommunicator": "0bff5e498f55c027",
        "megatron.core.pipeline_parallel.p2p_communication:_p2p_ops": "20995746a48170ca",
        "megatron.core.distributed.finalize_model_grads:finalize_model_grads": "8e8e2bb919cc02fc",
        "megatron.core.distributed.distributed_data_parallel:DistributedDataParallel": "f5d5b254272e5447",
        "megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBucketGroup": "1e751a925a09d60c",
        "megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBuffer": "e665ecce97d7e1e6",
        "megatron.core.optimizer.grad_scaler:MegatronGradScaler": "bc02d83783646a54",
        "megatron.core.optimizer.grad_scaler:DynamicGradScaler": "2ed3cdbcab8cb79f",
        "megatron.core.optimizer.optimizer:MixedPrecisionOptimizer.get_loss_scale": "a6a7df2ad3f05621",
        "megatron.core.optimizer.optimizer:MixedPrecisionOptimizer._unscale_main_grads_and_check_for_nan": "0cb7a5fb6d0d59d6",
        "megatron.core.optimizer.optimizer:MixedPrecisionOptimizer.prepare_grads": "458b98bd66138d0d",
        "megatron.core.optimizer.optimizer:MixedPrecisionOptimizer.step_with_ready_grads": "f337fd56940ad515",
        "megatron.core.optimizer.optimizer:MixedPrecisionOptimizer.step": "f6cdf8b33dd27176",
        "megatron.core.optimizer.optimizer:Float16OptimizerWithFloat16Params": "340125cdca6952c7",
        "megatron.core.optimizer.optimizer:FP32Optimizer": "0c37c2a2353a9e86",
        "megatron.core.optimizer.optimizer:ChainedOptimizer.step": "7f8c72f2d7210bf8",
        "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer._build_model_and_main_param_groups": "1b9f0ec06718f817",
        "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer._copy_model_grads_to_main_grads": "ffcdecd38d14405a",
        "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer._copy_main_params_to_model_params": "b92274c3f2e1e847",
        "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer.step_with_ready_grads": "4883dadbf822eab8",
    },
)

CORE_0_17 = CORE_0_16.then(  # recorded from 0.17.1
    "0.17",
    fingerprints={
        "megatron.core.pipeline_parallel.schedules:backward_step": "435628e2479e62f2",
        "megatron.core.pipeline_parallel.schedules:deallocate_output_tensor": "ec45aab59f2784a1",
        "megatron.core.pipeline_parallel.schedules:get_tensor_shapes": "aafd487b2ecd6cf8",
        "megatron.core.pipeline_parallel.schedules:forward_backward_pipelining_without_interleaving": "79bb2ba211d57422",
        "megatron.core.pipeline_parallel.p2p_communication:P2PCommunicator": "7301a12dceb9b13e",
        "megatron.core.distributed.distributed_data_parallel:DistributedDataParallel": "6288aa5a37356a3e",
        "megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBucketGroup": "542cdd9cf301968d",
        "megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBuffer": "90862cf7ff4209df",
        "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer._build_model_and_main_param_groups": "784788437ec21b41",
        "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer._copy_main_params_to_model_params": "00e6fe16e5751174",
    },
)

CORE_0_18 = CORE_0_17.then(  # recorded from 0.18.2
    "0.18",
    fingerprints={
        "megatron.core.pipeline_parallel.schedules:forward_backward_pipelining_without_interleaving": "c8fd558b6fdcd51b",
        "megatron.core.distributed.finalize_model_grads:finalize_model_grads": "1ea6af88d1ec1a5c",
        "megatron.core.distributed.distributed_data_parallel:DistributedDataParallel": "fc1074dee2ce1b01",
        "megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBucketGroup": "32dcdc0f04706be7",
        "megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBuffer": "fad57ad379194001",
        "megatron.core.optimizer.grad_scaler:MegatronGradScaler": "ca16b70adb375dce",
        "megatron.core.optimizer.grad_scaler:DynamicGradScaler": "fcb3a2d6fbdbb762",
        "megatron.core.optimizer.optimizer:ChainedOptimizer.step": "75c16d1537843e62",
        "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer._build_model_and_main_param_groups": "891e288eda547357",
        "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer._copy_model_grads_to_main_grads": "b14b52f057fb4a96",
        "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer._copy_main_params_to_model_params": "80e4f4d1fa99e747",
        "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer.step_with_ready_grads": "2350cce9dd8822dd",
    },
)

CORE_0_19 = CORE_0_18.then(  # recorded from 0.19.2
    "0.19",
    fingerprints={
        "megatron.core.pipeline_parallel.schedules:forward_backward_pipelining_without_interleaving": "772d6b7d81825e7a",
        "megatron.core.distributed.finalize_model_grads:finalize_model_grads": "36d18a1e17302e34",
        "megatron.core.distributed.distributed_data_parallel:DistributedDataParallel": "9330e58298a3c743",
        "megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBucketGroup": "f68c669b1ed4f2db",
        "megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBuffer": "3aad874c173ce6f1",
        "megatron.core.optimizer.optimizer:MixedPrecisionOptimizer.step_with_ready_grads": "34fc101b433f1515",
        "megatron.core.optimizer.optimizer:MixedPrecisionOptimizer.step": "c9adaf2e01df4ff8",
        "megatron.core.optimizer.optimizer:Float16OptimizerWithFloat16Params": "cd618b0e6d07a672",
        "megatron.core.optimizer.optimizer:FP32Optimizer": "6990c6a165af95fd",
        "megatron.core.optimizer.optimizer:ChainedOptimizer.step": "c2b301e02ec29f4e",
        "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer._build_model_and_main_param_groups": "3fce9be2b6d1d143",
    },
)

KNOWN = {release.version: release for release in (CORE_0_16, CORE_0_17, CORE_0_18, CORE_0_19)}


def stale() -> Iterator[Problem]:
    """Lists the functions of the imported megatron-core that do not read as recorded."""
    version = installed_version()
    release = KNOWN.get(minor_of(version))
    if release is None:
        needed = f"one of {', '.join(f'{known}.x' for known in KNOWN)}"
        yield Problem("megatron.core", version, needed, "install one of these to train without flushes")
    else:
        yield from release.stale()


def held_here() -> list[Held]:
    """What `megatron-lynx hooks` shows of them: nothing where this release cannot train without flushes."""
    release = KNOWN.get(minor_of(installed_version()))
    return [] if release is None else list(inventory(release, "double_buffered"))
