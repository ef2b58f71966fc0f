// A conversation of several turns with a tool, by Ollama's client from npm: node ollama_program.cjs URL
const { Ollama } = require('ollama')

const parameters = { type: 'object', properties: { city: { type: 'string' } }, required: ['city'] }
const tools = [{ type: 'function', function: { name: 'weather', description: 'The weather', parameters } }]

async function talk(url) {
  const client = new Ollama({ host: url })
  const model = (await client.list()).models[0].name
  const asked = []
  const messages = []
  let said = ''
  for (const [content, stream] of [['Compare Rome and Oslo.', false], ['And Lima?', true]]) {
    messages.push({ role: 'user', content })
    for (;;) {
      const answer = await client.chat({ model, messages, tools, stream })
      const message = { role: 'assistant', content: '', tool_calls: [] }
      for await (const part of stream ? answer : [answer]) {
        message.content += part.message.content
        message.tool_calls.push(...(part.message.tool_calls ?? []))
      }
      messages.push(message)
      said = message.content
      if (!message.tool_calls.length) break
      for (const { function: called } of message.tool_calls) {
        asked.push(called.arguments.city)
        messages.push({ role: 'tool', tool_name: called.name, content: `${called.arguments.city} is warm` })
      }
    }
  }
  console.log(JSON.stringify({ said: said.trim(), asked }))
}

talk(process.argv[2])
