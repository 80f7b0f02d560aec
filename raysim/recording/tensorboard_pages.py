"""What TensorBoard's pages are made of: values in its own messages, the arrangement of charts, tables and text cards."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from raysim.recording.hparams import Value
from raysim.recording.logger import RunInfo
from raysim.recording.metrics import MAX_CLIENT_CURVES, ROUNDS_TO, SIZES, size_bounds

LISTED_METRICS = {
    "global/accuracy": "accuracy",
    "global/best_accuracy": "best accuracy",
    "global/macro_f1": "macro F1",
    "global/loss": "loss",
    "result/seconds_per_round": "s per round",
    **{f"rounds_to/{percent}": f"rounds to {percent} %" for percent in ROUNDS_TO},
}
"""The columns of the page HParams that are results, with their headings; of the tags the last value."""

_LAYOUT_TAG = "custom_scalars__config__"


def opening(info: RunInfo) -> list[Any]:
    """What is written once, before the first round."""
    return [
        _layout(each_client=len(info.client_sizes) <= MAX_CLIENT_CURVES),
        _text("about", about(info)),
        # Indented text is code in Markdown, whatever characters it has.
        _text("config", "".join(f"    {line}\n" for line in info.config_yaml.splitlines())),
        *_session_start(info.hparams, info.study),
    ]


def closing(result: Mapping[str, Any]) -> list[Any]:
    """What is written once, at the end of a run."""
    from tensorboard.plugins.hparams import api_pb2
    from tensorboard.plugins.hparams.metadata import SESSION_END_INFO_TAG
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData, SessionEndInfo

    values = []
    if result["seconds_per_round"] is not None:
        values.append(scalar("result/seconds_per_round", result["seconds_per_round"]))
    # An interrupted run may be resumed; it has not ended.
    ended = {"finished": api_pb2.STATUS_SUCCESS, "failed": api_pb2.STATUS_FAILURE}
    if status := ended.get(result["status"]):
        end = SessionEndInfo(status=status, end_time_secs=time.time())
        values.append(_hparams(SESSION_END_INFO_TAG, HParamsPluginData(session_end_info=end)))
    return values


def is_of_a_round(tag: str) -> bool:
    """Whether a value belongs to its round, and not to the opening or closing of the file."""
    return not tag.endswith("/text_summary") and not tag.startswith(("_hparams_/", _LAYOUT_TAG, "result/"))


def scalar(tag: str, value: float) -> Any:
    """A point of a curve."""
    from tensorboard.compat.proto.summary_pb2 import Summary

    return Summary.Value(tag=tag, simple_value=value)


def histogram(tag: str, values: np.ndarray, bins: int) -> Any:
    """A histogram of finite values."""
    from tensorboard.compat.proto.histogram_pb2 import HistogramProto
    from tensorboard.compat.proto.summary_pb2 import Summary

    counts, edges = np.histogram(values, bins)
    content = HistogramProto(
        min=values.min(),
        max=values.max(),
        num=len(values),
        sum=values.sum(),
        sum_squares=(values * values).sum(),
        # A bucket reaches from the limit before it to its own; the first one begins at the smallest value.
        bucket_limit=edges[1:].tolist(),
        bucket=counts.tolist(),
    )
    return Summary.Value(tag=tag, histo=content)


def image(tag: str, png: bytes, width: int, height: int) -> Any:
    """A picture."""
    from tensorboard.compat.proto.summary_pb2 import Summary

    content = Summary.Image(height=height, width=width, colorspace=3, encoded_image_string=png)
    return Summary.Value(tag=tag, image=content)


def about(info: RunInfo) -> str:
    """A guide to the tags, in Markdown, with the run's own numbers."""
    bounds = size_bounds(info.client_sizes)
    sizes = (
        f"Medians of the third of all clients with the fewest training examples (`small`, up to {bounds[0]}), of the next "
        f"(`medium`, up to {bounds[1]}) and of the last (`large`): do large clients dominate?"
        if bounds
        else "Not here: most clients have the same number of training examples."
    )
    clients = len(info.client_sizes)
    each = "one curve per client" if clients <= MAX_CLIENT_CURVES else "quantiles over the cohort"
    rows = {
        "`global/`": "The global model on the test set. `recall` is per class; `best_accuracy` is the best round so far.",
        "`rounds_to/`": "The first round with so many per cent of test accuracy.",
        "`score/`": f"How far from stationary a client's model is on the server's validation set: {each}.",
        "`weight/`": f"How much a client counts in the new global model; sums to 1 in a round: {each}. `entropy` is "
        f"{np.log(max(clients, 1)):.2f} if all {clients} take part and count the same.",
        "`score/size_`, `weight/size_`": sizes,
        "`validation/`": "The clients' models on the validation set, medians.",
        "`layer/`": "Norm of the validation gradient in each unit of the model, median over the cohort.",
        "`time/`": "Seconds: training, the wait for the last score, aggregation, test, checkpoint, and the whole round.",
        "`pool/`": "Share of the time that client and scorer processes work; bytes that the driver moved over the network.",
        "`fault/`": "Work that was run again; clients that failed, were left out, or had no data.",
        "`heatmap/weight`": "Images (*Show actual image size*). Clients, largest on top, by rounds: orange counts more than "
        "an equal share, purple less, grey did not take part.",
        "`heatmap/layer_norm`": "Images. Units by rounds: where in the model the gradient is.",
    }
    lines = [
        f"**{_escaped(info.name)}**: step = round, up to {info.rounds}. **Custom Scalars** has these curves side by side.",
        "",
    ]
    lines += ["| tag | meaning |", "|---|---|", *(f"| {tag} | {meaning} |" for tag, meaning in rows.items())]
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    return "".join(f"\\{character}" if character in r"\`*_{}[]()<>#+-.!|" else character for character in text)


def _text(tag: str, content: str) -> Any:
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto

    shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)])
    tensor = TensorProto(dtype="DT_STRING", string_val=[content.encode()], tensor_shape=shape)
    return _plugin_value(f"{tag}/text_summary", "text", tensor)


def _plugin_value(tag: str, plugin: str, tensor: Any, content: bytes = b"") -> Any:
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata

    data = SummaryMetadata.PluginData(plugin_name=plugin, content=content)
    return Summary.Value(tag=tag, tensor=tensor, metadata=SummaryMetadata(plugin_data=data))


def _layout(*, each_client: bool) -> Any:
    """The same for every run of a study with the same number of clients, so that TensorBoard shows it once.

    The curves of a chart are given by regular expressions that match at the beginning of a tag; the three of a band are
    plain tags. None of the expressions holds a name that would have to be escaped.
    """
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.plugins.custom_scalar import layout_pb2 as pb

    def lines(title: str, *expressions: str) -> Any:
        return pb.Chart(title=title, multiline=pb.MultilineChartContent(tag=[f"^{one}$" for one in expressions]))

    def band(title: str, *series: tuple[str, str, str]) -> Any:
        content = [
            pb.MarginChartContent.Series(value=value, lower=lower, upper=upper) for value, lower, upper in series
        ]
        return pb.Chart(title=title, margin=pb.MarginChartContent(series=content))

    def of_clients(name: str) -> list[Any]:
        sizes = lines(f"{name}: median of small, medium, large clients", f"{name}/size_({'|'.join(SIZES)})")
        if each_client:
            return [lines(f"{name} of each client", rf"{name}/client_\d+"), sizes]
        middle = f"{name}/median"
        return [
            band(f"{name}: median, 10 to 90 % of the cohort", (middle, f"{name}/p10", f"{name}/p90")),
            band(f"{name}: median, least to most", (middle, f"{name}/min", f"{name}/max")),
            sizes,
        ]

    groups = {
        "global": [
            lines("accuracy (test)", "global/accuracy"),
            lines(
                "accuracy: best so far (test), global and clients (validation)",
                "global/(best|validation)_accuracy",
                "validation/accuracy_median",
            ),
            lines("macro F1 (test)", "global/macro_f1"),
            lines("loss: test, clients (validation)", "global/loss", "validation/loss_median"),
            lines("recall of each class (test)", "global/recall/.+"),
        ],
        "scores": of_clients("score"),
        "weights": [
            *of_clients("weight"),
            lines("largest weight, and error where a subset is scored", "weight/max", "weight/error"),
            lines("entropy of the weights", "weight/entropy"),
        ],
        "layers": [lines("norm of the validation gradient by unit", "layer/.+/norm_median")],
        "time": [lines("seconds by part of a round", "time/(?!round$).+"), lines("seconds per round", "time/round")],
        "pools": [lines("utilisation of clients and scorers", "pool/.+/utilisation")],
        "faults": [lines("clients and units of work", "fault/.+")],
    }
    layout = pb.Layout(category=[pb.Category(title=title, chart=charts) for title, charts in groups.items()])
    tensor = TensorProto(dtype="DT_STRING", string_val=[layout.SerializeToString()], tensor_shape={})
    return _plugin_value(_LAYOUT_TAG, "custom_scalars", tensor)


def _session_start(hparams: Mapping[str, Value], study: Mapping[str, Sequence[Value | None]]) -> list[Any]:
    """The run's row on the page HParams, and that page's columns.

    TensorBoard takes the columns from the first run it finds, whose values are not those of the others. So a key whose values
    in the whole study are not known has no bounds: its filter takes any number, and text has none.
    """
    from tensorboard.plugins.hparams import api_pb2
    from tensorboard.plugins.hparams.metadata import EXPERIMENT_TAG, SESSION_START_INFO_TAG
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData, SessionStartInfo

    columns, start = [], SessionStartInfo(start_time_secs=time.time())
    for path in dict.fromkeys([*study, *hparams]):
        values = [_shown(path, value) for value in study.get(path, ()) if value is not None]
        domain = list(values)
        if path in hparams:
            values.append(own := _shown(path, hparams[path]))
            field = {bool: "bool_value", float: "number_value", str: "string_value"}[type(own)]
            setattr(start.hparams[path], field, own)
        kinds = {type(value) for value in values}
        kind = api_pb2.DATA_TYPE_STRING
        if kinds == {bool}:
            kind = api_pb2.DATA_TYPE_BOOL
        elif kinds == {float}:
            kind = api_pb2.DATA_TYPE_FLOAT64
        column = api_pb2.HParamInfo(name=path, type=kind, differs=True)
        column.domain_discrete.extend(domain)
        columns.append(column)
    metrics = [
        api_pb2.MetricInfo(name=api_pb2.MetricName(tag=tag), display_name=title)
        for tag, title in LISTED_METRICS.items()
    ]
    experiment = api_pb2.Experiment(hparam_infos=columns, metric_infos=metrics, time_created_secs=start.start_time_secs)
    return [
        _hparams(EXPERIMENT_TAG, HParamsPluginData(experiment=experiment)),
        _hparams(SESSION_START_INFO_TAG, HParamsPluginData(session_start_info=start)),
    ]


def _shown(path: str, value: Value) -> Value:
    """Numbers as numbers; a seed is a name: "1", where a number would be shown as 1.0000."""
    return (
        value if isinstance(value, bool) else str(value) if isinstance(value, str) or path == "seed" else float(value)
    )


def _hparams(tag: str, data: Any) -> Any:
    from tensorboard.plugins.hparams.metadata import NULL_TENSOR, PLUGIN_NAME

    return _plugin_value(tag, PLUGIN_NAME, NULL_TENSOR, data.SerializeToString())
