"""The registered model for MLflow's users: `mlflow.pyfunc.load_model("models:/NAME/VERSION").predict(...)`.

An own flavour, since MLflow's transformers flavour loads the whole model in order to log it. `describe` adds a few small
files to a model directory; the weights stay where they are and are loaded at the first prediction. Whoever loads it
needs Polythink installed.

    model.predict(pd.DataFrame([{"messages": [{"role": "user", "content": "…"}], "reasoning_language": "German"}]))
"""

import json
import warnings
from pathlib import Path
from typing import Any

INPUT_EXAMPLE = {
    "messages": [{"role": "user", "content": "¿Cuál es el capital de Australia?"}],
    "reasoning_language": "German",
}
PARAMETERS = {"max_new_tokens": 512, "temperature": 0.0, "top_p": 1.0}


def describe(model_dir: Path, run_id: str | None = None) -> None:
    """Writes `MLmodel` with signature and flavour, an input example, and requirements into `model_dir`."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*Any type hint is inferred")  # MLflow's own classes have some
        from mlflow.models import Model
        from mlflow.pyfunc import add_to_model

    from training.environment import PACKAGES, package_version

    model_dir = Path(model_dir)
    requirements = [f"{name}=={found}" for name in PACKAGES if (found := package_version(name))]
    (model_dir / "requirements.txt").write_text("\n".join(requirements) + "\n", encoding="utf-8")
    description = Model(artifact_path="model", run_id=run_id, signature=_signature())
    add_to_model(description, loader_module="training.tracking.mlflow_model", data=".")
    example = {"columns": list(INPUT_EXAMPLE), "data": [list(INPUT_EXAMPLE.values())]}
    (model_dir / "input_example.json").write_text(json.dumps(example, ensure_ascii=False), encoding="utf-8")
    description.saved_input_example_info = {
        "artifact_path": "input_example.json",
        "type": "dataframe",
        "pandas_orient": "split",
    }
    description.save(str(model_dir / "MLmodel"))


def _signature() -> Any:
    from mlflow.models import ModelSignature
    from mlflow.types import ColSpec, DataType, ParamSchema, ParamSpec, Schema
    from mlflow.types.schema import Array, Object, Property

    text = DataType.string
    message = Object([Property("role", text), Property("content", text)])
    inputs = Schema([ColSpec(Array(message), "messages"), ColSpec(text, "reasoning_language", required=False)])
    outputs = Schema([ColSpec(text, name) for name in ("reasoning", "answer", "finish_reason")])
    kinds = {int: DataType.long, float: DataType.double}
    params = ParamSchema([ParamSpec(name, kinds[type(default)], default) for name, default in PARAMETERS.items()])
    return ModelSignature(inputs, outputs, params)


def _load_pyfunc(path: str, model_config: dict[str, Any] | None = None) -> "ThinkingModel":
    """What MLflow calls; the name is MLflow's."""
    return ThinkingModel(Path(path))


class ThinkingModel:
    """Answers conversations, thinking in the language that is asked for."""

    def __init__(self, directory: Path):
        self.directory = directory
        self._loaded: tuple[Any, Any] | None = None

    def predict(self, model_input: Any, params: dict[str, Any] | None = None) -> Any:
        """Reasoning and answer for each conversation.

        Args:
            model_input: a data frame, or a list of dictionaries, with `messages` (OpenAI's form, oldest first) and
                optionally `reasoning_language`.
            params: max_new_tokens, temperature, top_p.

        Returns:
            A data frame with `reasoning`, `answer` and `finish_reason`, one row per conversation.
        """
        import pandas

        from training.generate import generate

        model, renderer = self._model()
        rows = model_input.to_dict("records") if hasattr(model_input, "to_dict") else list(model_input)
        answers = generate(model, renderer, [_conversation(row) for row in rows], **PARAMETERS | (params or {}))
        return pandas.DataFrame(
            [
                {"reasoning": a.parsed.reasoning, "answer": a.parsed.answer, "finish_reason": a.parsed.finish_reason}
                for a in answers
            ]
        )

    def _model(self) -> tuple[Any, Any]:
        if self._loaded is None:
            import torch
            from transformers import AutoTokenizer

            from training.harmony import Renderer
            from training.merging.shards import Checkpoint
            from training.model.load import load

            cuda = torch.cuda.is_available()
            packed = any(name.endswith("_blocks") for name in Checkpoint.open(self.directory).entries)
            model = load(
                self.directory,
                weights="mxfp4" if cuda and packed else "bf16",
                precision="bf16" if cuda else "fp32",
                device="cuda" if cuda else "cpu",
            )
            tokenizer: Any = AutoTokenizer.from_pretrained(self.directory)
            self._loaded = model, Renderer(tokenizer)
        return self._loaded


def _conversation(row: dict[str, Any]) -> list[dict[str, Any]]:
    from training.harmony import with_reasoning_language
    from training.language import language_code, language_name

    messages = [dict(message) for message in row["messages"]]
    asked = row.get("reasoning_language")
    if not isinstance(asked, str):  # absent, or the NaN that a data frame has for it
        return messages
    return with_reasoning_language(messages, language_name(language_code(asked)))
