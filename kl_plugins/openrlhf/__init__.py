"""The OpenRLHF plugin: `kl-openrlhf`, a Ray worker hook, and a source patch with the same behaviour.

`hook` runs at the start of every Ray worker and must stay light; `adapter` holds what is put into OpenRLHF, and is
imported only after the OpenRLHF module that it changes.
"""
