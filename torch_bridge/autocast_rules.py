"""What torch.autocast does on an accelerator, written as casts into a graph on the host.

The rules are those of `precision`, for regions that a module opens itself.
"""

from typing import Any

import torch
from torch.fx import GraphModule

from torch_bridge.precision import Rule, cast, rule_of_name

_aten = torch.ops.aten


# Compositions of operators that have a rule; torch.export keeps them whole.
_WHOLE = {
    **dict.fromkeys("lstm gru rnn_tanh rnn_relu".split(), Rule.LOWER),
    **dict.fromkeys("cross_entropy_loss nll_loss_nd softmin norm normalize".split(), Rule.FLOAT32),
    **dict.fromkeys("cat stack concat hstack vstack".split(), Rule.WIDEST),
}
_OF_DTYPES = {_aten._assert_tensor_metadata.default}


def rule_of(operator: Any) -> Rule | None:
    """The rule for an overload, or None if autocast leaves it alone."""
    if not isinstance(operator, torch._ops.OpOverload) or operator.namespace != "aten":
        return None
    name = operator._schema.name.removeprefix("aten::").removesuffix("_")
    if name in _WHOLE:
        return _WHOLE[name]
    if not torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), "AutocastCUDA"):
        return None
    return rule_of_name(name)


def apply_rules(body: GraphModule, dtype: torch.dtype) -> None:
    """Make the operators of an autocast region cast what they take, in place."""
    for node in list(body.graph.nodes):
        if node.op != "call_function":
            continue
        rule = rule_of(node.target)
        if node.target in _OF_DTYPES:
            body.graph.erase_node(node)  # states the dtypes without autocast
        elif rule is not None:
            node.args = (node.target, rule.value, dtype, *node.args)
            node.target = run_cast
    body.recompile()


def run_cast(operator: Any, rule: str, lower: torch.dtype, *args: Any, **kwargs: Any) -> Any:
    """Run an operator as autocast does. It runs while the graph is decomposed, where dtypes are known."""
    if rule == Rule.FLOAT32.value and kwargs.get("dtype") is not None:
        return operator(*args, **kwargs)
    args, kwargs = cast(Rule(rule), lower, args, kwargs)
    return operator(*args, **kwargs)
