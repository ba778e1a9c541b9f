"""Whether a plan for a job may defer weight gradients; if not, why."""

from __future__ import annotations

from megatron_lynx.config.job import Job


def why_none_deferred(job: Job) -> str | None:
    """Why no weight gradient is deferred, in words; None where they may be."""
    asked = job.overlap.weight_gradients
    if job.policy != "planned":
        return f"policy {job.policy} is stock's: it waits where stock waits"
    if asked == "none":
        return "overlap.weight_gradients is none (--no-gradient-accumulation-fusion): nothing adds them up where they lie"
    if job.userbuffers:
        return "with userbuffers it exchanges in its GEMM, or reads a buffer that the next layer fills"
    if job.schedule == "double_buffered":
        return "without flushes a forward may hide those of another version of the weights: that is not planned yet"
    if asked == "auto" and job.cluster.device == "cpu":
        return "on the testbed only where the job asks for it (overlap.weight_gradients: deferred)"
    return None
