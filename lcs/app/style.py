"""Theme and style sheet. System fonts only: the page asks no other server for anything."""

from __future__ import annotations

import gradio as gr

FONTS = ("ui-sans-serif", "system-ui", "-apple-system", "Segoe UI", "Roboto", "Helvetica", "Arial", "sans-serif")
MONO = ("ui-monospace", "SFMono-Regular", "Menlo", "Consolas", "monospace")


def theme() -> gr.themes.Base:
    return gr.themes.Base(
        primary_hue="indigo", secondary_hue="slate", neutral_hue="slate", radius_size="lg", font=FONTS, font_mono=MONO
    ).set(
        body_background_fill="*neutral_50",
        body_background_fill_dark="*neutral_950",
        block_background_fill="white",
        block_background_fill_dark="*neutral_900",
        block_border_width="1px",
        block_shadow="none",
        button_primary_background_fill="*primary_600",
        button_primary_background_fill_hover="*primary_700",
        button_primary_background_fill_dark="*primary_600",
        button_primary_background_fill_hover_dark="*primary_500",
        button_primary_text_color="white",
        block_label_text_weight="500",
    )


CSS = """
.gradio-container { max-width: 1360px !important; margin: 0 auto; }
.gradio-container .main { padding-top: 12px; }
.gradio-container .html-container { padding: 0; }
.hero { display: flex; gap: 18px; align-items: baseline; flex-wrap: wrap; padding: 2px 2px 0; }
.hero h1 { font-size: 1.45rem; font-weight: 700; margin: 0; letter-spacing: -.01em; }
.hero p { margin: 0; color: var(--body-text-color-subdued); font-size: .95rem; }
.hero a, .lead a { padding: 0; }
.hero a { color: var(--link-text-color); }
.lead { margin: 4px 2px 2px; max-width: 78ch; line-height: 1.5; color: var(--body-text-color); }
.hint { color: var(--body-text-color-subdued); font-size: .85rem; margin: 0 2px -8px; }
.examples { gap: 8px !important; flex-wrap: wrap; }
.examples .example { flex: 0 1 auto !important; border-radius: 999px; padding: 5px 13px; font-weight: 500; }
.actions { gap: 8px !important; }
.downloads, .link { gap: 8px !important; align-items: center; }
.layers .wrap { gap: 6px; }

/* the board */
.board { border-radius: 12px; overflow: hidden; cursor: crosshair; touch-action: manipulation; max-width: 460px;
  margin: 0 auto; border: 1px solid var(--border-color-primary); line-height: 0; user-select: none;
  background: linear-gradient(165deg, #868789 0%, #a3a3a2 48%, #8f8e8d 100%); }
.board svg { width: 100%; height: auto; display: block; }
.cells { stroke: #fff; stroke-opacity: .22; stroke-width: .25; fill: none; }
.board .cell { fill: #fff; fill-opacity: 0; pointer-events: none; }
.board:hover .cell { fill-opacity: .3; }
.asked text { fill: #fff; text-anchor: middle; font-weight: 700; font-family: var(--font); pointer-events: none; }
.halo { stroke: #000; stroke-opacity: .55; stroke-width: 2.2; fill: none; }
.probe { stroke: #fff; stroke-width: 1.1; fill: none; }
.colors { display: grid; grid-template-columns: repeat(4, 1fr); gap: 10px; padding: 6px 2px; }
.swatch { display: flex; flex-direction: column; align-items: center; gap: 3px; font-size: .8rem; }
.swatch button { width: 100%; aspect-ratio: 1.5; border-radius: 10px; border: 2px solid transparent; color: #fff;
  font-size: 1.15rem; font-weight: 700; cursor: pointer; text-shadow: 0 1px 3px #000a; }
.swatch.on button:not(.less) { border-color: var(--color-accent); box-shadow: 0 0 0 2px var(--color-accent-soft); }
.swatch .less { aspect-ratio: auto; padding: 0; height: 22px; background: var(--background-fill-secondary);
  color: var(--body-text-color); text-shadow: none; font-size: .9rem; }
.swatch .less:disabled { opacity: .35; cursor: default; }

/* samples */
.cards { display: grid; grid-template-columns: repeat(auto-fill, minmax(150px, 1fr)); gap: 12px; margin: 0; }
.cards.n1 { grid-template-columns: minmax(0, 420px); }
.cards.n2, .cards.n3, .cards.n4 { grid-template-columns: repeat(2, minmax(0, 1fr)); }
.cards.n9, .cards.n13 { grid-template-columns: repeat(auto-fill, minmax(118px, 1fr)); }
.cards.n9 figcaption, .cards.n13 figcaption { font-size: .76rem; padding: 5px 8px 6px; }
.over { margin: 0 0 6px; font-size: .95rem; font-weight: 600; }
.over.below { margin-top: 12px; }
.card { margin: 0 !important; border-radius: 12px; overflow: hidden; border: 1px solid var(--border-color-primary);
  background: var(--block-background-fill); }
.card .picture { width: 100%; height: auto; display: block; }
.card figcaption { padding: 6px 10px 7px; font-size: .84rem; color: var(--body-text-color); line-height: 1.35;
  border-top: 3px solid transparent; margin: 0; text-align: left; font-style: normal; }
.card.complete figcaption { border-top-color: #1f9d63; }
.card.failed figcaption { border-top-color: #e0a100; }
.card.ghost { aspect-ratio: 1 / 1.13; border-style: dashed; opacity: .7; background: repeating-linear-gradient(135deg,
  var(--background-fill-secondary) 0 10px, var(--block-background-fill) 10px 20px); }
.found { fill: none; stroke-width: 1.1; }
.no-asked .asked, .no-found .found { display: none; }
.picture.sharp image { image-rendering: pixelated; }

.gradio-container pre, .gradio-container pre code { white-space: pre-wrap !important; overflow-wrap: anywhere; }
.gradio-container .prose { min-width: 0; max-width: 100%; }

/* words */
.note { padding: 9px 13px; border-radius: 10px; background: var(--background-fill-secondary); font-size: .92rem;
  border-left: 4px solid var(--border-color-primary); line-height: 1.45; }
.note.good { border-left-color: #1f9d63; } .note.bad { border-left-color: #e0a100; }
.progress { position: relative; height: 34px; border-radius: 10px; background: var(--background-fill-secondary);
  overflow: hidden; }
.progress i { position: absolute; inset: 0 auto 0 0; background: var(--color-accent); opacity: .28;
  transition: width .2s linear; }
.progress span { position: relative; line-height: 34px; padding: 0 13px; font-size: .88rem; }
.empty { border: 1px dashed var(--border-color-primary); border-radius: 12px; padding: 18px; text-align: left;
  color: var(--body-text-color); background: var(--background-fill-secondary); }
.empty p { margin: 4px 0 10px; color: var(--body-text-color-subdued); max-width: 70ch; }
.empty code { display: block; width: fit-content; max-width: 100%; overflow-wrap: anywhere; margin: 5px 0;
  padding: 5px 10px; border-radius: 8px; background: var(--block-background-fill); }
.missing { font-size: .83rem; color: var(--body-text-color-subdued); line-height: 1.5; }
.missing summary, .tables summary { cursor: pointer; }
.tables { margin-top: 12px; } .tables details { margin: 4px 0; }

/* words of a prompt */
.board.plain { max-width: none; border: 0; border-radius: 0; background: none; }
.bar { position: relative; height: 20px; margin: 2px 0; border-radius: 5px; overflow: hidden;
  background: var(--background-fill-secondary); }
.bar i { position: absolute; inset: 0 auto 0 0; background: var(--color-accent); opacity: .45; }
.bar span { position: relative; z-index: 1; font-size: .78rem; line-height: 20px; padding: 0 7px; }

/* locality */
.panels { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 330px), 1fr)); gap: 14px; }
.panel { border: 1px solid var(--border-color-primary); border-radius: 14px; padding: 12px;
  background: var(--block-background-fill); min-width: 0; }
.panel h4 { margin: 0 0 8px; font-size: .98rem; font-weight: 600; }
.frame { display: none; } .frame.on { display: block; }
.pair { display: grid; grid-template-columns: 1fr 1fr; gap: 10px; }
.pair figure { margin: 0 !important; min-width: 0; }
.pair .picture { width: 100%; border-radius: 10px; display: block; }
.pair figcaption { font-size: .79rem; color: var(--body-text-color-subdued); margin-top: 5px; line-height: 1.35;
  text-align: left; font-style: normal; }
.square { fill: none; stroke: #7df9c6; stroke-width: .9; }
.curve-row { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 230px), 1fr)); gap: 10px;
  margin-top: 10px; }
.curve { min-width: 0; } .curve svg { width: 100%; height: auto; display: block; }
.curve-title { font-size: .82rem; font-weight: 600; }
.curve text { fill: var(--body-text-color-subdued); font-size: 9px; font-family: var(--font); }
.curve .grid { stroke: var(--border-color-primary); stroke-width: .6; }
.curve polyline { fill: none; stroke-linejoin: round; }
.curve .cursor { stroke: var(--body-text-color); stroke-width: 1; stroke-dasharray: 3 2; }
.legend { display: flex; flex-wrap: wrap; gap: 2px 10px; font-size: .74rem; color: var(--body-text-color-subdued); }
.legend i { display: inline-block; width: 11px; height: 3px; margin-right: 4px; vertical-align: middle; }
.vs { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 320px), 1fr)); gap: 16px; }
.vs > div { min-width: 0; }

/* tables */
.scroll { overflow-x: auto; max-width: 100%; }
.claims { width: 100%; border-collapse: collapse; font-size: .88rem; }
.claims th { text-align: left; font-weight: 600; padding: 7px 9px;
  border-bottom: 2px solid var(--border-color-primary); }
table.claims th, table.claims td, table.claims tr { border-left: 0; border-right: 0; border-top: 0; }
.claims td { padding: 8px 9px; border-bottom: 1px solid var(--border-color-primary); vertical-align: top; }
.claims .rule { display: block; color: var(--body-text-color-subdued); font-size: .8rem; margin-top: 2px; }
.badge { display: inline-block; border-radius: 999px; padding: 1px 10px; font-size: .78rem; font-weight: 600;
  white-space: nowrap; color: #fff; background: #64748b; }
.badge.yes { background: #1b8a57; } .badge.partly { background: #b97f00; } .badge.no { background: #c0392b; }
.matrix { border-collapse: collapse; font-size: .78rem; }
.matrix td, .matrix th { padding: 4px 6px; text-align: center; }
.matrix th { font-weight: 500; background: none !important; }
.matrix, .matrix td, .matrix th, .matrix tr { border: 0 !important; }
.matrix td { min-width: 38px; border-radius: 4px; }

@media (max-width: 640px) {
  .gradio-container { padding-left: 6px !important; padding-right: 6px !important; }
  .gradio-container .main { padding-left: 0; padding-right: 0; }
  .hero h1 { font-size: 1.2rem; }
  .cards { gap: 8px; }
  .card figcaption { font-size: .76rem; padding: 5px 7px 6px; }
  .claims, .claims tbody, .claims tr, .claims td { display: block; }
  .claims thead { display: none; } .claims td { border: 0; padding: 3px 2px; }
  .claims tr { border-bottom: 1px solid var(--border-color-primary); padding: 8px 0; }
  .claims td[data-name]::before { content: attr(data-name) ": "; color: var(--body-text-color-subdued); }
}
"""
