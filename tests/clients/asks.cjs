// Node's clients: `node asks.cjs openai` prints as JSON what that client made of its answers.
const { z } = require("zod");

const [model, question] = ["demo", "Who is Hugo?"];
const messages = [{ role: "user", content: question }];
const person = z.object({ who: z.literal("Hugo") });
const parameters = z.toJSONSchema(person);
const execute = async ({ who }) => `${who} is a hedgehog`;

const clients = {
  async openai() {
    const { OpenAI } = require("openai");
    const { zodTextFormat } = require("openai/helpers/zod");
    const { chat, responses } = new OpenAI({ maxRetries: 0 });
    const whole = await chat.completions.create({ model, messages, temperature: 0 });
    const stream = responses.stream({ model, input: question, temperature: 0 });
    const kinds = [];
    for await (const event of stream) kinds.push(event.type);
    const { output_text: text } = await stream.finalResponse();
    const format = zodTextFormat(person, "person");
    const parsed = await responses.parse({ model, input: question, text: { format } });
    const tools = [{ type: "function", function: { name: "look_up", parameters } }];
    const once = { tools, tool_choice: "required", parallel_tool_calls: false };
    const asked = await chat.completions.create({ model, messages, ...once });
    const called = asked.choices[0].message.tool_calls[0].function;
    return {
      streamed: text === whole.choices[0].message.content && text !== "",
      ends: [kinds.at(0), kinds.at(-1)],
      found: `Person(who='${parsed.output_parsed.who}')`,
      called: [called.name, JSON.parse(called.arguments)],
    };
  },

  async "@ai-sdk/openai"() {
    const { openai } = require("@ai-sdk/openai");
    const { generateText, streamText, Output, tool, stepCountIs } = require("ai");
    const asked = { model: openai(model), prompt: question, system: "Be brief.", maxRetries: 0 };
    const whole = await generateText({ ...asked, temperature: 0 });
    const streamed = await streamText({ ...asked, temperature: 0 }).text;
    const { output } = await generateText({ ...asked, output: Output.object({ schema: person }) });
    const tools = { look_up: tool({ inputSchema: person, execute }) };
    const prepareStep = ({ stepNumber }) => ({ toolChoice: stepNumber ? "none" : "required" });
    const told = await generateText({ ...asked, tools, stopWhen: stepCountIs(2), prepareStep });
    const [call] = told.steps[0].toolResults;
    return {
      streamed: streamed === whole.text && streamed !== "" && told.steps.length === 2,
      usage: whole.usage.outputTokens > 0,
      found: `Person(who='${output.who}')`,
      called: [call.toolName, call.input],
    };
  },

  async "@openai/agents"() {
    const { Agent, run, tool, setTracingDisabled } = require("@openai/agents");
    setTracingDisabled(true);
    const tools = [tool({ name: "look_up", description: "x", parameters: person, execute })];
    const modelSettings = { toolChoice: "required", parallelToolCalls: false };
    const given = { model, instructions: "Be brief.", outputType: person };
    const agent = new Agent({ name: "Guide", ...given, tools, modelSettings });
    const result = await run(agent, question, { stream: true });
    let events = 0;
    for await (const _ of result) events += 1;
    return { found: `Person(who='${result.finalOutput.who}')`, streamed: events > 0 };
  },

  async "@anthropic-ai/sdk"() {
    const { Anthropic } = require("@anthropic-ai/sdk");
    const { messages: client } = new Anthropic({ maxRetries: 0 });
    const asked = { model, max_tokens: 100, messages };
    const { usage } = await client.create(asked);
    const streamed = await client.stream(asked).finalMessage();
    const tools = [{ name: "look_up", input_schema: parameters }];
    const tool_choice = { type: "any", disable_parallel_tool_use: true };
    const stream = client.stream({ ...asked, tools, tool_choice });
    const [call] = (await stream.finalMessage()).content;
    const counted = await client.countTokens({ model, messages });
    return {
      streamed: streamed.content[0].text.length > 0,
      usage: counted.input_tokens === usage.input_tokens + usage.cache_read_input_tokens,
      called: [call.name, call.input],
    };
  },
};

clients[process.argv[2]]().then((seen) => console.log(JSON.stringify(seen)));
