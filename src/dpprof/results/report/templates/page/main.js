// Shows the answer at once, then one view after the other, so that the first is there soon.

const VIEWS = [showCalculator, showFigures, showTradeoff, showExperiments, showStep, showPeaks, showKernels, showRoofline, showAccuracy, showCompare, showOutcomes];

async function showAll() {
  showAnswer();
  for (const show of VIEWS) {
    await new Promise((resolve) => setTimeout(resolve));
    show();
  }
  document.documentElement.dataset.ready = "yes";
}
showAll();
