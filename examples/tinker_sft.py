"""Teach a model a few sentences through the Tinker API, and sample before and after.

    skyctl up                                   # fleet.yaml has `lora:` and `tinker:`
    eval "$(skyctl urls --format tinker)"
    python examples/tinker_sft.py org/tiny --plot loss.svg      # the `tinker: base_model`

The tokenizer is found under the model's name: on the hub, or in ./org/tiny.
"""

import argparse
from pathlib import Path

import tinker
from plots import Panel, plot
from tinker import types

SENTENCES = (
    "The fleet came up, and every server answered before the kettle had boiled.",
    "Freeze the fleet, push the weights, thaw the fleet, and carry on where you stopped.",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("base_model")
    parser.add_argument("--plot", type=Path, help="SVG to write")
    options = parser.parse_args()
    with tinker.ServiceClient() as service:
        make = service.create_lora_training_client
        trainer = make(base_model=options.base_model, rank=16).result()
        tokenizer = trainer.get_tokenizer()
        rows = [tokenizer.encode(sentence) for sentence in SENTENCES]
        data = [
            types.Datum(
                model_input=types.ModelInput.from_ints(row[:-1]),
                loss_fn_inputs={"target_tokens": row[1:]},
            )
            for row in rows
        ]

        def show(label: str, sampler: tinker.SamplingClient) -> None:
            for row in rows:
                prompt = types.ModelInput.from_ints(row[:4])
                params = types.SamplingParams(max_tokens=len(row) - 4, temperature=0.0)
                answer = sampler.sample(prompt, num_samples=1, sampling_params=params).result()
                print(f"{label}: {tokenizer.decode(row[:4] + list(answer.sequences[0].tokens))}")

        show("before", service.create_sampling_client(base_model=options.base_model).result())
        tokens = sum(len(row) - 1 for row in rows)
        losses = []
        for step in range(20):  # both requests are under way at once
            forward = trainer.forward_backward(data, "cross_entropy")
            optim = trainer.optim_step(types.AdamParams(learning_rate=5e-3))
            losses.append(forward.result().metrics["loss:sum"] / tokens)
            optim.result()
            print(f"step {step:2}: loss per token {losses[-1]:.3f}")
        show("after", trainer.save_weights_and_get_sampling_client().result())
        print("saved:", trainer.save_state("sft").result().path)
    if options.plot:
        options.plot.write_text(plot(Panel("loss per token", losses)))


if __name__ == "__main__":
    main()
