/* How the search ranks pages. Sphinx gives 15 for a word in a heading and 5 for one in the text. Here a guide's section
   whose heading is about as long as the query comes first, then a page whose title or file name has the query, then
   guides, then pages that only mention a word. */
const GUIDES = ["index", "nn", "torch", "keras", "tensorflow", "cudnn", "mpsgraph", "convert", "recurrence", "cells"];
GUIDES.push("five_minutes", "training", "quantize", "engines", "recipes", "distributed");
const BEHIND = ["changelog", "contributing", "machine_code", "emulator", "shaders", "references", "gallery", "dialects"];

var Scorer = {
    score: ([page, title, anchor, description, score]) => {
        const isGuide = GUIDES.includes(page), isSection = title.includes(" > ");
        const query = (new URLSearchParams(window.location.search).get("q") || "").toLowerCase().trim();
        const isNamed = !isSection && !page.startsWith("api/") && `${page} ${title}`.toLowerCase().includes(query);
        return score + (isGuide ? (isSection ? 17 : 3) : 0) + (isNamed ? 12 : 0) - (BEHIND.includes(page) ? 2 : 0);
    },
    objNameMatch: 11,
    objPartialMatch: 6,
    objPrio: { 0: 5, 1: 5, 2: -5 },
    objPrioDefault: 0,
    title: 15,
    partialTitle: 7,
    term: 5,
    partialTerm: 2,
};
