from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from training import device
from training.device import autocast, resolve


@pytest.mark.parametrize(
    ("amx", "avx512", "vendor", "gains"),
    [
        (False, False, "AuthenticAMD", False),
        (False, True, "AuthenticAMD", True),
        (False, True, "GenuineIntel", False),
        (False, True, "", False),
        (True, True, "GenuineIntel", True),
    ],
)
def test_precision_auto_follows_the_hardware(
    monkeypatch: pytest.MonkeyPatch, amx: bool, avx512: bool, vendor: str, gains: bool
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512)
    monkeypatch.setattr(device, "cpu_vendor", lambda: vendor)
    monkeypatch.setattr(device, "device", lambda: torch.device("cpu"))
    assert device.cpu_gains_by_bf16() is gains
    assert resolve("auto") == ("bf16" if gains else "fp32")
    assert resolve("bf16") == "bf16" and resolve("fp32") == "fp32"


def test_autocast_narrows_for_bf16_alone() -> None:
    with autocast("bf16"):
        assert (
            torch.ones(2, 2) @ torch.ones(2, 2)
        ).dtype == torch.bfloat16 or torch.accelerator.is_available()
    with autocast("fp32"):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32


def test_the_vendor_is_read_from_the_systems_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nvendor_id\t: AuthenticAMD\ncpu family\t: 25\n")
    for name, vendor in (("cpuinfo", "AuthenticAMD"), ("absent", "")):
        monkeypatch.setattr(device, "CPU_INFO", tmp_path / name)
        device.cpu_vendor.cache_clear()
        assert device.cpu_vendor() == vendor
    device.cpu_vendor.cache_clear()


@pytest.mark.parametrize("native", [True, False])
def test_precision_auto_asks_the_accelerator(monkeypatch: pytest.MonkeyPatch, native: bool) -> None:
    asked = []

    def supported(including_emulation: bool) -> bool:
        asked.append(including_emulation)
        return native

    monkeypatch.setattr(device, "device", lambda: torch.device("cuda", 0))
    monkeypatch.setattr(
        torch, "get_device_module", lambda where: SimpleNamespace(is_bf16_supported=supported)
    )
    assert resolve("auto") == ("bf16" if native else "fp32") and asked == [False]
    monkeypatch.setattr(device, "device", lambda: torch.device("privateuseone", 0))
    assert resolve("auto") == "bf16"
