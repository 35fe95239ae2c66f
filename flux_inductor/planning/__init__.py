"""What is decided at compile time: topology, problem, plan, schedule, cost, strategy.

Everything here is plain data and pure functions: no tensors, no processes, no engine, and no import of
torch, so that a plan can be made, printed and checked anywhere.
"""
