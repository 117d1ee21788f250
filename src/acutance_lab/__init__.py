"""Published claims about attention, tested, and the small models that they need.

One experiment is one file of :mod:`acutance_lab.experiments`: its claims, their measurement and its
figure. :mod:`acutance_lab.run` runs them, and :mod:`acutance_lab.command` is ``acutance
reproduce``. Only public names of acutance are used.
"""
