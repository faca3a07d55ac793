"""The digest's kernel as it is compiled for a GPU."""

from __future__ import annotations

from tests.gpu.conftest import need_gpus


def test_the_compiled_kernel_gives_the_numbers_of_the_plain_code() -> None:
    need_gpus(1, "triton")
    from skyctl.wire.device_digest import digest_on_device
    from skyctl.wire.finite import EXPONENTS
    from skyctl.wire.triton_digest import sum_words
    from tests.unit.engines.digest_cases import broken_in_places, for_the_kernel

    tensors = [*for_the_kernel(), *broken_in_places()]
    numbers = digest_on_device(tensors)
    on_gpu = [tensor.cuda() for tensor in tensors]
    broken = [t.dtype in EXPONENTS and not bool(t.isfinite().all()) for t in tensors]
    assert sum_words(on_gpu).tolist() == [numbers, [int(each) for each in broken]]
    assert digest_on_device(on_gpu) == numbers
