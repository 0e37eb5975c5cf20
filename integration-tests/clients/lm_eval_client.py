"""EleutherAI's harness with tasks of our own: log-likelihoods and generation, twice, to the same digit."""

import glob
import json
import os
import subprocess
import sys
import tempfile

from checks import equal, holds, run

CHOICES = [
    ("The capital of France is", [" Paris", " Banana", " seven"], 0),
    ("Two plus two is", [" purple", " four", " Berlin"], 1),
    ("The opposite of hot is", [" cold", " chair", " Tuesday"], 0),
    ("Water is made of hydrogen and", [" carpets", " music", " oxygen"], 2),
    ("A week has seven", [" days", " moons", " forks"], 0),
    ("Dogs and cats are", [" numbers", " animals", " cities"], 1),
]

LIKELIHOOD = """
task: baton_choices
dataset_path: json
dataset_kwargs: {data_files: {test: "%s"}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
target_delimiter: ""
metric_list: [{metric: acc}]
"""

GENERATION = """
task: baton_words
dataset_path: json
dataset_kwargs: {data_files: {test: "%s"}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{choices[answer]}}"
target_delimiter: ""
generation_kwargs: {until: ["\\n", "."], max_gen_toks: 12, do_sample: false, temperature: 0}
metric_list: [{metric: exact_match}]
"""


def tasks(folder):
    data = os.path.join(folder, "data.jsonl")
    with open(data, "w", encoding="utf-8") as file:
        for question, choices, answer in CHOICES:
            file.write(json.dumps({"question": question, "choices": choices, "answer": answer}) + "\n")
    for name, text in (("choices", LIKELIHOOD), ("words", GENERATION)):
        with open(os.path.join(folder, f"{name}.yaml"), "w", encoding="utf-8") as file:
            file.write(text % data)


def evaluate(reference, folder, output, tokenizer):
    """One run: accuracy, and what was asked and answered for every example."""
    arguments = f"model={reference.model},base_url={reference.url}/v1/completions,num_concurrent=4,max_retries=1,{tokenizer}"
    command = [sys.executable, "-m", "lm_eval", "--model", "local-completions", "--model_args", arguments]
    command += ["--tasks", "baton_choices,baton_words", "--include_path", folder, "--output_path", output, "--log_samples"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise AssertionError(f"lm_eval ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    samples = {}
    for path in glob.glob(os.path.join(output, "**", "samples_*.jsonl"), recursive=True):
        with open(path, encoding="utf-8") as file:
            for line in file:
                sample = json.loads(line)
                task = os.path.basename(path).split("_2")[0]
                samples[task, sample["doc_id"]] = sample["resps"]
    results = glob.glob(os.path.join(output, "**", "results_*.json"), recursive=True)
    equal("result files", len(results), 1)
    with open(results[0], encoding="utf-8") as file:
        return json.load(file)["results"], samples


def case_two_runs_agree_to_the_digit(reference):
    with tempfile.TemporaryDirectory() as folder:
        os.environ["HF_HOME"] = os.path.join(folder, "home")
        tasks(folder)
        tokenizer = "tokenizer_backend=remote"
        if reference.tokenizer:
            tokenizer = f"tokenizer_backend=huggingface,tokenizer={reference.tokenizer}"
        tokenizer += ",tokenized_requests=False"
        first, second = (evaluate(reference, folder, os.path.join(folder, name), tokenizer) for name in ("a", "b"))
        equal("examples", len(first[1]), 2 * len(CHOICES))
        equal("the second run", second[1], first[1])
        accuracy = first[0]["baton_choices"]["acc,none"]
        equal("accuracy of the second run", second[0]["baton_choices"]["acc,none"], accuracy)
        holds(f"better than chance: {accuracy}", accuracy >= reference.least_accuracy)


if __name__ == "__main__":
    run(dict(globals()))
