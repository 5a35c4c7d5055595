"""What JAX does again for every program, done once: for a suite of ten thousand small ones.

Both reach into JAX, change no number, and are left out where a version of JAX has other names.
`pytest --optimised` has neither.
"""

import functools
import hashlib
import threading

import jax

PROGRAMS = {}


def _within(context):
    try:
        return context.current is not None
    except ValueError:
        return False


def install():
    """Lower every program in one MLIR context a thread; compile equal programs once."""
    try:
        from jax._src import compiler
        from jax._src.interpreters import mlir
        from jax._src.lib.mlir import ir

        make, compile_and_load = mlir.make_ir_context, compiler.backend_compile_and_load
    except (ImportError, AttributeError):
        return
    of_thread = threading.local()

    @functools.wraps(make)
    def make_ir_context():
        if _within(ir.Context):  # lowered while another is: in the same it would be a part of it
            return make()
        if not hasattr(of_thread, "context"):
            of_thread.context = make()  # 4 ms, as long as the rest of a small program's lowering
        return of_thread.context

    @functools.wraps(compile_and_load)
    def backend_compile_and_load(backend, module, devices, options, host_callbacks):
        text = module.operation.get_asm(enable_debug_info=False)
        if host_callbacks or "callback" in text:
            return compile_and_load(backend, module, devices, options, host_callbacks)
        given = (text, str(devices), id(backend))
        key = hashlib.sha256(repr(given).encode() + options.SerializeAsString()).digest()
        if key not in PROGRAMS:
            PROGRAMS[key] = compile_and_load(backend, module, devices, options, host_callbacks)
        return PROGRAMS[key]

    mlir.make_ir_context = make_ir_context
    compiler.backend_compile_and_load = backend_compile_and_load


def forget():
    """As after `jax.clear_caches`."""
    PROGRAMS.clear()
    jax.clear_caches()
