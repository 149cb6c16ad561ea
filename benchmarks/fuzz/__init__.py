"""A fuzzer: random programs under random options, held against PyTorch.

python -m benchmarks.fuzz --cases 100 --seed 0              # programs 0 to 99 of a seed
python -m benchmarks.fuzz --cases 1 --seed 0 --case 17      # one of them again
python -m benchmarks.fuzz --cases 9999 --minutes 30 --jobs 2
python -m benchmarks.fuzz --cases 100 --without forks       # leaves out a feature of benchmarks.fuzz.case

A case is a module, drawn from the kinds of operations in :mod:`benchmarks.fuzz.operations`, a use of its outputs, and
several ways of compiling it, behind any front door. What is compared with what says :mod:`benchmarks.fuzz.check`. A
case that fails is made smaller and is printed as a program that fails by itself.
"""
