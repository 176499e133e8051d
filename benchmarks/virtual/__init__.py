"""Virtual time (docs/design.md §10): the production scheduler, nodes and env pools on a loop whose clock jumps, with modelled
parts at the ports alone: engine, environment workers, learner, weights, and the tokenizer.
"""
