"""One rank of `hpcrl train` in which one method fails: METHOD CALL_NUMBER CONFIG [OVERRIDES].

METHOD is module:Class.method of a module that needs no torch, so that it can be broken before
training begins on every rank; only the role that calls it fails.
"""

import importlib
import sys

from hpcrl.start.training import train_command

method, number, config, *overrides = sys.argv[1:]
module_name, _, path = method.partition(":")
class_name, _, method_name = path.partition(".")
owner = getattr(importlib.import_module(module_name), class_name)
original = getattr(owner, method_name)
calls = 0


def faulty(self, *arguments, **keywords):
    global calls
    calls += 1
    if calls == int(number):
        raise ValueError(f"{method} broke on purpose")
    return original(self, *arguments, **keywords)


setattr(owner, method_name, faulty)
sys.exit(train_command(config, overrides))
