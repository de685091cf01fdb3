"""Finds the packages and builds the native kernels; the rest stands in pyproject.toml, whose own discovery does not see
through package-dir."""

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import BaseError, CCompilerError


class BuildKernels(build_ext):
    """One shared library with a C ABI, loaded by ctypes: no Python header, so no interpreter's ABI. Optional: without a
    compiler the package installs all the same, and its operators take their slower paths."""

    def build_extension(self, ext):
        if self.compiler.compiler_type == "msvc":
            raise BaseError("the kernels need GCC or Clang")
        flags = ["-O3", "-std=c++17", "-fvisibility=hidden", "-Wno-maybe-uninitialized"]
        last = None
        for threads in (["-fopenmp"], []):  # a compiler without OpenMP still gives the kernels of one thread
            ext.extra_compile_args, ext.extra_link_args = flags + threads, threads
            try:
                return super().build_extension(ext)
            except (BaseError, CCompilerError) as error:
                last = error
        raise last


native = Extension("simkit.kernels.salr._native", ["kernels/salr/native.cpp"], language="c++", optional=True)
kernels = ["simkit.kernels", *(f"simkit.kernels.{name}" for name in find_packages("kernels"))]
setup(
    packages=[*find_packages(include=["simkit", "simkit.*"]), "simkit.hwprofiles", "simkit.validation", *kernels],
    ext_modules=[native],
    cmdclass={"build_ext": BuildKernels},
)
