"""What a configuration descends, told with numbers: `kl-plugins audit`.

- `frameworks`: the installed framework's own KL, as the function it runs.
- `read`: a recipe or a command line as a `Setting`; `read_verl`, `read_openrlhf` do it for one framework.
- `judge`: gradients on small problems, tails, classification, all by measurement.
- `report`: findings and tables.

Nothing that is read is executed: YAML is loaded safely, a `_target_` is compared with a name and never instantiated.
"""
