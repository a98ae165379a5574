"""`qgraph devices`: what can compute here, and why the rest cannot (level 12)."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import click

from .options import json_option, provider_option
from .output import emit, emit_json, size, table

# backend → the switch that builds it; its devices' names start with the backend's
SWITCHES = {"CUDA": "GGML_CUDA", "ROCm": "GGML_HIP", "Metal": "GGML_METAL", "Vulkan": "GGML_VULKAN", "SYCL": "GGML_SYCL"}


@click.command(name="devices")
@json_option
@provider_option
def command(as_json: bool, ggml: str | None) -> None:
    """Show what can compute here, and why the rest cannot.

    The libggml in use, its devices with memory and features, and the backends and other providers that are missing.
    """
    report = describe(ggml)
    if as_json:
        emit_json(report)
    else:
        emit("\n".join(lines(report)) + "\n")


def list_devices(provider: str | None) -> None:
    """Print the devices as llama.cpp's `--list-devices` does."""
    emit("Available devices:\n")
    for device in describe(provider)["devices"]:
        total, free = device["memory_total"] >> 20, device["memory_free"] >> 20
        emit(f"  {device['name']}: {device['description']} ({total} MiB, {free} MiB free)\n")


def describe(name: str | None) -> dict:
    """Return what `devices` shows as plain values; opens the provider."""
    from .. import ggml

    provider = ggml.provider(name)
    devices = ggml.devices()
    return {
        "provider": {"name": provider.name, "ggml_version": provider.version, "folder": provider.folder},
        "devices": [_device(device) for device in devices],
        "missing_backends": dict(_missing_backends(provider.folder, [device.name for device in devices])),
        "other_providers": dict(_other_providers(provider.name)),
    }


def _device(device) -> dict:
    from ..memory import available_memory

    free, total = available_memory(device), device.memory()[1]
    return {
        "name": device.name,
        "kind": device.kind,
        "description": device.description,
        "memory_free": free,
        "memory_total": total,
        "buffer_types": [device.buffer_type().name, *(extra.name for extra in device.extra_buffer_types())],
        "features": [name if value == "1" else f"{name}={value}" for name, value in device.features.items()],
        "library": device.library,
    }


def _missing_backends(folder: str, present: list[str]) -> Iterator[tuple[str, str]]:
    for backend, switch in SWITCHES.items():
        if any(name.startswith(backend) for name in present):
            continue
        library = next(Path(folder).glob(f"*ggml-{backend.lower()}*"), None)
        if library:
            yield backend, f"{library.name} is there and reports no device: no such hardware, or no driver for it"
        elif backend == "Metal" and sys.platform != "darwin":
            yield backend, "exists on macOS only"
        else:
            yield backend, f"not built into this libggml; rebuild it with CMAKE_ARGS=-D{switch}=ON"


def _other_providers(current: str) -> Iterator[tuple[str, str]]:
    from ..ggml.provider import PACKAGES

    for name, (package, _) in PACKAGES.items():
        if name != current:
            there = importlib.util.find_spec(package) is not None
            yield name, f"installed; --ggml {name} selects it" if there else f"no Python package {package}"


def lines(report: dict) -> Iterator[str]:
    """Yield the report as text."""
    provider = report["provider"]
    yield f"ggml {provider['ggml_version']} from {provider['name']}: {provider['folder']}"
    for device in report["devices"]:
        yield from ("", f"{device['name']} ({device['kind']}): {device['description']}")
        yield f"  memory    {size(device['memory_free'])} free of {size(device['memory_total'])}"
        yield f"  buffers   {', '.join(device['buffer_types'])}"
        yield f"  features  {', '.join(device['features']) or 'not told'}"
        yield f"  library   {device['library']}"
    for title, key in (("missing backends", "missing_backends"), ("other providers", "other_providers")):
        yield from ("", title)
        yield from table(report[key].items(), indent="  ")
