"""A page: type a sentence, choose a defense, see what a server reads, and what that costs."""

from __future__ import annotations

import gradio as gr
from leak import AT_PLACE, ELSEWHERE, LISTED, LONGEST, WRONG, choices, price, reconstruct

from hf_gradguard.heads.arguments import NOISE_MULTIPLIER
from hf_gradguard.recommend.evidence import pairs_bound

COLORS = {AT_PLACE: "#ffb86b", ELSEWHERE: "#ffe08a", WRONG: "#d7dee8"}  # below dark text
UNPROTECTED = "none"
NAMES = {
    "gaussian_noise": "relative_scale=20",
    "optimal_noise": "relative_scale=20",
    "pruning": "ratio=0.99",
    "quantization": "bits=1",
}
"""Defenses of the page, each with the strength that is chosen at first."""

INTRODUCTION = """# What does a shared gradient give away?

In federated learning a client sends the gradient of its text, not the text. A server that holds
the model can still reconstruct the text. Write a sentence, choose how its gradient is protected,
and see what an attack makes of both."""

SITE = "https://hf-gradguard.github.io/hf-gradguard"
NOTES = f"""A quick attack that finds no word proves nothing: a slower one
[reconstructed words]({SITE}/findings/attacks_text/#a-search-by-likelihood) behind noise of 20
times the gradient.
**Words distinguished** asks what no search decides: which of two sentences that differ in one word
is the message of? Half is chance. Only differential privacy is
[proved]({SITE}/differential_privacy/) against every attacker. Nothing that you write is stored."""

EXAMPLE = "my favourite chair is comfortable and well made."


def look(sentence: str, name: str, strength: str):
    """What the page shows of one sentence."""
    defense = f"{name}:{strength}"
    try:
        leak = reconstruct(sentence, defense)
    except ValueError as error:
        raise gr.Error(str(error), print_exception=False) from error
    rows = "".join(
        f"- **{shown}**: {leak.recovered[label]:.0%} of the words reconstructed, "
        "{:g} of {} words distinguished".format(*leak.distinguished[label])
        + f"{cost}\n"
        for label, shown, cost in (
            (UNPROTECTED, "Unprotected", "."),
            (defense, defense, f". It costs {price(defense)}."),
        )
    )
    rows += (
        "- **A linear head, by proof**: no attacker says which of two sentences was shared in more "
        f"than {pairs_bound(NOISE_MULTIPLIER):.0%} of cases; half is chance. From a list of "
        f"{len(LISTED) + 1} sentences the server guesses: *{leak.guess}* "
        f"[What that costs]({SITE}/head/).\n"
    )
    return leak.words[UNPROTECTED], leak.words[defense], rows


def build() -> gr.Blocks:
    """The page."""
    strengths = choices()
    first = next(iter(NAMES))
    with gr.Blocks(title="What a gradient gives away") as page:
        gr.Markdown(INTRODUCTION)
        sentence = gr.Textbox(EXAMPLE, label="Your sentence", max_length=LONGEST)
        name = gr.Radio(list(NAMES), value=first, label="Defense")
        strength = gr.Radio(strengths[first], value=NAMES[first], label="Strength")
        share = gr.Button("Share its gradient", variant="primary")
        with gr.Row():
            shown = [
                gr.HighlightedText(
                    label=label, color_map=COLORS, show_legend=True, combine_adjacent=False
                )
                for label in ("Reconstructed, unprotected", "Reconstructed behind the defense")
            ]
        summary = gr.Markdown()
        gr.Markdown(NOTES)
        name.change(lambda chosen: gr.Radio(strengths[chosen], value=NAMES[chosen]), name, strength)
        for event in (share.click, sentence.submit):
            event(look, [sentence, name, strength], [*shown, summary])
    return page


if __name__ == "__main__":
    build().launch()
