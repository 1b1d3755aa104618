/* How the search ranks pages: as Sphinx does, but guides come before pages that only mention a word. */
const BEHIND = ["changelog", "contributing", "machine_code", "emulator", "shaders", "references", "gallery", "dialects"];
const AHEAD = ["nn", "torch", "recurrence", "five_minutes", "training", "api/nn", "api/torch", "api/mlx_lstm"];

var Scorer = {
    score: ([page, title, anchor, description, score]) =>
        score + (BEHIND.includes(page) ? -2 : 0) + (AHEAD.includes(page) ? 2 : 0),
    objNameMatch: 11,
    objPartialMatch: 6,
    objPrio: { 0: 15, 1: 5, 2: -5 },
    objPrioDefault: 0,
    title: 15,
    partialTitle: 7,
    term: 5,
    partialTerm: 2,
};
