"""Published claims about attention, tested, and the small models that they need.

One experiment is one function of :mod:`acutance_lab.experiments`, which measures, decorated with
its claims and figure. :mod:`acutance_lab.run` runs them, and :mod:`acutance_lab.command` is
``acutance reproduce``. Only public names of acutance are used.
"""
