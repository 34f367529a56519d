"""Where there is no GPU, decorate our Triton kernels for Triton's interpreter; the environment stays as it was.

What a masked load leaves out without saying what it shall be is NaN here, where the interpreter has zeros.

Triton reads TRITON_INTERPRET when a function is decorated, its own library included, so this must run before anything
else imports triton.language (torch alone does not).
"""

import os

import numpy as np
import torch

if not torch.cuda.is_available():
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        import triton.experimental.gluon.language  # noqa: F401  imported by the first launch otherwise, without the switch
        import triton.language as tl
        from triton.runtime import interpreter

        import megatron_tree.core.kernels.triton  # noqa: F401

        _patch = interpreter._patch_lang

        def _patch_once(fn):
            """Every call of a device function patches triton.language anew (0.7 ms): leave it when it is patched."""
            modules = [m for m in fn.__globals__.values() if m is tl or m is tl.core]
            if modules and not any(tl.core.is_builtin(m.load) for m in modules):
                return interpreter._LangPatchScope()
            return _patch(fn)

        interpreter._patch_lang = _patch_once
        # it computes every sum of integers a second time in 64 bits, for an assertion that is left out without `debug`
        interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
        _np_dtype, _np_dtypes = interpreter._get_np_dtype, {}

        def _np_dtype_once(kind):
            """It makes a dictionary of all types at every call."""
            name = kind.scalar.name
            if name not in _np_dtypes:
                _np_dtypes[name] = _np_dtype(kind)
            return _np_dtypes[name]

        interpreter._get_np_dtype = _np_dtype_once
        _masked_load = interpreter.InterpreterBuilder.create_masked_load

        def _poisoned_load(self, ptrs, mask, other, *options, **named):
            if other is None:
                kind = ptrs.get_element_ty()
                dtype = interpreter._get_np_dtype(kind)
                poison = np.nan if np.issubdtype(dtype, np.floating) else np.iinfo(dtype).max
                other = interpreter.TensorHandle(np.full(ptrs.data.shape, poison, dtype), kind)
            return _masked_load(self, ptrs, mask, other, *options, **named)

        interpreter.InterpreterBuilder.create_masked_load = _poisoned_load

        def _descriptor_reduce(self, kind, descriptor, value, indices):
            """The interpreter has no reductions by descriptor; ours add, and programs run one after another."""
            assert kind == interpreter._ir.DESCRIPTOR_REDUCE_KIND.ADD, kind
            before = self.create_descriptor_load(descriptor, indices, None, None)
            total = interpreter.TensorHandle(before.data + value.data, before.dtype)
            self.create_descriptor_store(descriptor, total, indices)

        interpreter.InterpreterBuilder.create_descriptor_reduce = _descriptor_reduce
    finally:
        if before is None:
            del os.environ["TRITON_INTERPRET"]
        else:
            os.environ["TRITON_INTERPRET"] = before
